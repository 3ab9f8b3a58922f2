"""Rendezvous of several nodes: its key-value store, and the record of the world that the nodes agree on."""
