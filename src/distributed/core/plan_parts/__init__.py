"""Parts of a plan, each with what can be read off it."""
