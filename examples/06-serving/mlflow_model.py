"""The exported program as a model of MLflow, which needs neither this library nor the model's code to serve it.

    python mlflow_model.py served/digits.pt2 served/mlflow
    mlflow models serve -m served/mlflow --env-manager local --port 5001
    curl http://127.0.0.1:5001/invocations -H 'Content-Type: application/json' -d '{"inputs": [[0.0, …]]}'

MLflow runs this file again where it loads the model: "models from code".
"""

from __future__ import annotations

import sys
from typing import Any

import mlflow
import numpy as np
import torch
from mlflow.pyfunc import PythonModel


class Digits(PythonModel):  # type: ignore[misc]
    """Rows of 64 numbers to the probabilities of ten digits."""

    def load_context(self, context: Any) -> None:
        self.program = torch.export.load(context.artifacts["program"]).module()

    def predict(self, context: Any, model_input: Any, params: Any = None) -> np.ndarray:
        images = torch.from_numpy(np.asarray(model_input, dtype="float32"))
        with torch.no_grad():
            return self.program(images).softmax(1).numpy()


if __name__ == "__main__":
    program, folder = sys.argv[1:]
    example = np.zeros((2, 64), dtype="float32")
    mlflow.pyfunc.save_model(
        folder,
        python_model=__file__,
        artifacts={"program": program},
        input_example=example,
        signature=mlflow.models.infer_signature(example, np.zeros((2, 10), dtype="float32")),
        pip_requirements=["mlflow", "torch", "numpy"],
    )
    print(f"mlflow models serve -m {folder} --env-manager local")
else:
    mlflow.models.set_model(Digits())
