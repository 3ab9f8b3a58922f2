"""Where checkpoints are kept: folders and URLs, chunks by their hash, and who may write."""
