"""Whether every sample was used once, and whether ranks and runs have the same data."""
