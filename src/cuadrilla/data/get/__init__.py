"""Corpora from elsewhere: the web, object stores, the Hugging Face hub."""
