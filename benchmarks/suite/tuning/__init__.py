"""What a search costs beside its trials."""
