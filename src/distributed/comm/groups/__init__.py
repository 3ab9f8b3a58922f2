"""This rank in its groups: what it has called, whom it waits for, and the memory that is sent."""
