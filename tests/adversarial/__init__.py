"""Drawn cases: random models, optimizers, losses, data and strategies, each compared with a plain loop."""
