"""Checkpoints and the files of other programs: import, export, verify, compare."""
