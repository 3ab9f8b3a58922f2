"""Time to the first step, by engine."""
