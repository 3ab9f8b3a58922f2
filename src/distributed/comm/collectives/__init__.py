"""Collectives over torch's process groups, each with a name and a deadline."""
