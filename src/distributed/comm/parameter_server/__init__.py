"""Gradients to the rank that steps by them, and its parameters back to the ranks that compute them."""
