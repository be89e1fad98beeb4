"""Who starts the workers and reports their death."""
