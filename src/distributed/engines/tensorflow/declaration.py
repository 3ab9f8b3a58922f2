"""TensorFlow as an engine: what it can, and where its parts are."""

from __future__ import annotations

from distributed.core.engines.engine import Engine, PeerLoss, Support
from distributed.core.engines.features import Feature, by_value

_LOST = ("UnavailableError", "AbortedError", "DeadlineExceededError")

TENSORFLOW = Engine(
    "distributed.engines.tensorflow.worker:main",
    needs="tensorflow",
    extra="tensorflow",
    does="TensorFlow's own strategies, for Keras models",
    can={
        "bf16": Support(),
        "fp16": Support(),
        "accumulation": Support(),
        "clipping": Support(),
        "clip_value": Support(),
        "stream": Support("tf.data"),
        "batchnorm": Support(),
        "restart": Support(),
        "cluster": Support("multi_worker"),
        "parameter_server": Support("a worker that dies is replaced alone"),
    },
    features={
        "parameter_server": Feature(
            "asynchronous workers around a parameter server", by_value("tensorflow_strategy", "parameter_server")
        )
    },
    models="keras",
    peer_losses=(
        PeerLoss((*_LOST, "InternalError"), says=r"collective ops is aborted|coordination (service|agent)"),
        # The bare name of a task is in every error of a task's own kernels too.
        PeerLoss(_LOST, says=r"(remote target|error reported from) /job:(worker|chief|ps)/"),
    ),
    plans="distributed.engines.tensorflow.plan:plan_engine",
    processes="distributed.engines.tensorflow.plan:processes",
    roles="distributed.engines.tensorflow.world.cluster:roles",
    preloads=("tensorflow", "keras", "distributed.engines.tensorflow.worker"),
)
