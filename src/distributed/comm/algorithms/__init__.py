"""All-reduces written out over messages, each readable by itself: ring, recursive doubling, tree, two-level."""
