"""A checkpoint becomes a state again: found, verified, fetched and put together."""
