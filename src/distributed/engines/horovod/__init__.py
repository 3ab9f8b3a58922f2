"""Horovod: its plan, its ring of ranks, the step with its reductions, and its trainer."""
