"""TensorFlow's side of a run: its strategies, its loop and its state. Nothing here imports torch."""
