"""Throughput over 1..N processes."""
