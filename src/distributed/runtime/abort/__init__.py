"""How a rank ends its part in a world that broke: NCCL's communicators aborted, the sockets of gloo shut down."""
