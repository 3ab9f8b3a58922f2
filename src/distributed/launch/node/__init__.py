"""The ranks of one node: their processes, their logs, and the signals that end them."""
