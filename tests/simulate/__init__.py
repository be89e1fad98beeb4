"""Simulates a whole crew under a virtual clock, with network, disk and crashes: many runs a second."""
