"""What this machine is, what will go wrong when it trains, and the exact command that repairs it."""
