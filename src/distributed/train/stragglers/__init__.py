"""Slow ranks and slow links, found from what each rank says of itself."""
