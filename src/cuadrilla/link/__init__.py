"""How a worker reaches the coordinator."""
