"""Tensor and sequence parallelism: which layers are cut, how, and the trial that the result stays the same."""
