"""The vocabulary: typed data and errors that both halves share; no torch, no I/O."""
