"""What a run has trained: loaded into the user's objects, averaged, and in the forms of other programs."""
