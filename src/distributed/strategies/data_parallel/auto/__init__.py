"""compression="auto": what measures a run of replicas, and what it does about its gradients."""
