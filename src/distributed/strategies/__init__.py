"""A batch becomes a step."""
