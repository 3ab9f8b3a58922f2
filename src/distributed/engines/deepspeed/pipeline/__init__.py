"""DeepSpeed's own pipelines."""
