"""TensorFlow: its strategies, its loop and its state. Nothing here imports torch."""
