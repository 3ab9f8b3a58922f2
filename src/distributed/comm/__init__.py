"""What crosses the wire: reductions in a fixed order."""
