"""`distributed bench network`: what the link between nodes carries, over plain TCP sockets, and RDMA where it is."""
