"""A batch: the order of samples is a function of seed and epoch, and each rank takes its share of it."""
