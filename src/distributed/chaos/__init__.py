"""Faults on purpose: hosts that can be cut off, for tests and chaos runs."""
