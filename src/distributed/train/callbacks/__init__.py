"""Code of the user's at points of a training: the interface, its calls, and callbacks that are ready to use."""
