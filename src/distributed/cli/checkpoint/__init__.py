"""`distributed checkpoint`."""
