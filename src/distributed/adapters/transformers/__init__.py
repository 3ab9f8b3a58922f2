"""The arguments of the transformers Trainer as settings of a run, its data, losses and metrics as a task."""
