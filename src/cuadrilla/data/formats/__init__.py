"""Readers of text in files. Each turns bytes into texts, in bounded memory, and refuses files that are not text."""
