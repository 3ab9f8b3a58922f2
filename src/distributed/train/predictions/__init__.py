"""Predictions of every row of a dataset once, in its order: in memory, or in files that are read row by row."""
