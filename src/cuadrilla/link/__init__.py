"""The connection between workers and the coordinator."""
