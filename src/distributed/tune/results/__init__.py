"""What a search found, as tables, pictures and files."""
