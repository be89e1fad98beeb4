"""The dashboard: one page, and the HTTP calls that it makes."""
