"""`validate`, `test` and `predict` without a training."""
