"""Readers of text in files: each turns bytes into texts, in bounded memory, and refuses what only looks like text."""
