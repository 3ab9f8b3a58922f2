"""A Keras model: what of it is sent to the ranks, what its loss is a mean over, and its rates."""
