"""What a checkpoint costs."""
