"""Short trials before a run: a learning rate, and the largest batch."""
