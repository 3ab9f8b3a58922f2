"""Checks while a run trains: replicas are equal, every sample once, state that is not saved."""
