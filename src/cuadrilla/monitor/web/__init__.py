"""The dashboard: one page, and what it asks for."""
