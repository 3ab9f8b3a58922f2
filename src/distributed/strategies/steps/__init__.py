"""The steps of a rank: over micro-batches, in phases, by hand, and without gradients."""
