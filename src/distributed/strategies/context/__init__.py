"""Context parallelism: each rank holds a shard of the sequence."""
