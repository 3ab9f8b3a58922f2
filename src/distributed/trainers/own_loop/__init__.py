"""The door for a loop of the user's own: a script keeps its loop, and the rest of a run is done for it."""
