"""Better settings for a run, searched by trials that are runs."""
