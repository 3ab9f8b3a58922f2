"""Ray: its plan, the launcher on its clusters, its data, its trainer, and trials in Ray Tune."""
