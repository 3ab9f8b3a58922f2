"""Launchers: a plan becomes the processes of its ranks."""
