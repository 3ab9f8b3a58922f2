"""The front door: Trainer and the classes named after their frameworks."""
