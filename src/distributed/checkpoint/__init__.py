"""State at rest."""
