"""What a run writes as JSON and reads back, whole and by its version: config.json, and the way for plan.json."""
