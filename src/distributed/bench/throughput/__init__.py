"""Samples a second of our Trainer beside hand-written loops."""
