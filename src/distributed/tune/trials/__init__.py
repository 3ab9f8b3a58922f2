"""Trials of a search: their processes, their devices, and how each of them ends."""
