"""Strategies: how a global batch becomes an optimizer step on the ranks."""
