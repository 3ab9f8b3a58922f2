"""The peers of `distributed bench throughput`: what of them is installed trains beside ours."""

from __future__ import annotations

from distributed.bench.throughput.contenders import WITHOUT_PEERS, Contender

CONTENDERS: dict[str, Contender] = WITHOUT_PEERS | {
    "lightning": Contender(
        "benchmarks.suite.peers.lightning:train",
        "lightning",
        "peers",
        setup="Lightning Trainer with its progress bar, self.log of the loss, and TensorBoard",
    ),
    "fabric": Contender(
        "benchmarks.suite.peers.fabric:train",
        "lightning",
        "peers",
        setup="Lightning Fabric with the user's own loop; no logging",
    ),
    "accelerate": Contender(
        "benchmarks.suite.peers.accelerate:train",
        "accelerate",
        "peers",
        setup="Hugging Face Accelerate with the user's own loop; no logging",
    ),
    "ray": Contender(
        "benchmarks.suite.hand_written.ray:train",
        "ray",
        "ray",
        setup="Ray Train's prepare_model with the user's own loop in workers that Ray placed; no logging",
        devices=("cpu",),
        engine="ray",
    ),
}
