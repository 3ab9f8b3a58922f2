"""Loaders: this rank's samples as batches, by rows, by worker processes, one step ahead."""
