"""A model's summary: its layers with their parameters, shapes, FLOPs and memory, found out without allocating any."""
