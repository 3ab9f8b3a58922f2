"""A user's own training, with N ranks and with one."""
