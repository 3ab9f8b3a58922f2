"""The processes and devices of a TensorFlow run: its cluster, the strategy that keeps them alike, the servers."""
