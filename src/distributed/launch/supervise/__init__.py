"""Supervision of a run over all its attempts: the first failure, the rank that hangs, and the decision on it."""
