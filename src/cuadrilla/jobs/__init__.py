"""Whole runs as jobs: each is trained by one machine, here or in the crew."""
