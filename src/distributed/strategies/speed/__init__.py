"""Faster steps: fp8, bf16 parameters, fused optimizers, settings of the device."""
