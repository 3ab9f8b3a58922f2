"""DeepSpeed: its plan, its configuration, the step behind its engine, and its state."""
