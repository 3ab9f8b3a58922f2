"""Other people's engines, one folder each; none knows another, and only the registry knows their names."""
