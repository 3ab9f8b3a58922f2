"""What users give: models, optimizers, schedulers, tasks in arguments; and what is read of batches and results."""
