"""A plan becomes processes."""
