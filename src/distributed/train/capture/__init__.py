"""The step as one CUDA graph or as compiled code, tried and compared with the eager one."""
