"""The exported program behind Ray Serve: requests that come together are computed together.

pip install "distributed-training[serve]"
python ray_serve.py served/digits.pt2 --port 8000
curl http://127.0.0.1:8000/ -H 'Content-Type: application/json' -d '{"image": [0.0, …]}'
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from ray import serve
from starlette.requests import Request


@serve.deployment(max_ongoing_requests=128)
class Digits:
    """One image of 64 numbers to its digit and how sure that is."""

    def __init__(self, program: str) -> None:
        self.program = torch.export.load(program).module()

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.01)
    async def classify(self, images: list[list[float]]) -> list[dict[str, float]]:
        with torch.no_grad():
            sure, digit = self.program(torch.tensor(images)).softmax(1).max(1)
        return [{"digit": int(d), "probability": float(p)} for d, p in zip(digit, sure, strict=True)]

    async def __call__(self, request: Request) -> dict[str, float]:
        return await self.classify((await request.json())["image"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--once", action="store_true", help="end when the server is up, for a try")
    args = parser.parse_args()
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    serve.run(Digits.bind(str(Path(args.program).absolute())), blocking=not args.once)


if __name__ == "__main__":
    main()
