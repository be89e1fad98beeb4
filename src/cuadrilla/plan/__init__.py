"""Arithmetic about the work of each machine and the settings of a run. Never imports torch."""
