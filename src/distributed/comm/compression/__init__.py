"""Gradient compression: what ranks send in place of whole gradients, and what they keep for the next step."""
