"""The end of a rank: what a script leaves open is written, and the process leaves without waiting for threads."""
