"""A LightningModule as a task: its steps, hooks, optimizers and data, without Lightning's own loop."""
