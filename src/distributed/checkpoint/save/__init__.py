"""A state becomes a checkpoint: staged, written, assembled, published, and retained."""
