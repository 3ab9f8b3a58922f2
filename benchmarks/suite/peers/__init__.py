"""Other trainers over the same workload."""
