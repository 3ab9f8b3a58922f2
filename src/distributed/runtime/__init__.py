"""Inside one rank: the session, its collectives, heartbeats and orderly ends."""
