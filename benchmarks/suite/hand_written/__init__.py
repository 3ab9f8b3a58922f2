"""Each engine's own minimal loop, as its tutorial has it."""
