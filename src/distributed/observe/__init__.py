"""What happened, never steering."""
