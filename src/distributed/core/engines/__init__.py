"""What an engine declares of itself: what it can do, what starts it, and the hooks that it fills."""
