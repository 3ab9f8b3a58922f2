"""What a checkpoint is: trees, tensors, chunks and the manifest, as plain data."""
