"""How fast this machine trains, sends, saves and recovers: what `distributed bench` measures."""
