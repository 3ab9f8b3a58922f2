"""Committed measurements, and the suite that makes those of our trainers beside others."""
