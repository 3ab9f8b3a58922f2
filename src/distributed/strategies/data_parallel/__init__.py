"""Data parallelism: DDP, FSDP2 and ZeRO-1, with their gradients and buffers."""
