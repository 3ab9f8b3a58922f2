"""How fast, against whom."""
