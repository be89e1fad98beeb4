"""A whole crew under a virtual clock: network, disk, crashes and promotion, many runs a second."""
