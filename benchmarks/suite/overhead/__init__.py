"""The cost of a step over a hand-written loop."""
