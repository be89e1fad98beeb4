"""Arithmetic about who does how much. Never imports torch."""
