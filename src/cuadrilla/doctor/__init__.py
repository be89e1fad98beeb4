"""What this machine is, what will go wrong when it trains, and the exact command that repairs it.

A check is a function that reads and judges: a generator of findings, in the file of its family and in `CHECKS`.
"""
