"""Checks for models that several ranks cannot train as one process would, before or in the first steps."""
