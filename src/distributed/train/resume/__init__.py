"""Resuming: what has changed since the checkpoint, and the certificate that the run is the same."""
