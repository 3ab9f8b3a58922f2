"""Preparation of a model on any mesh: blocks, compilation, recomputation, LoRA, meta tensors."""
