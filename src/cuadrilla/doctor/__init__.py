"""What this machine is, what will go wrong when it trains, and the exact command that repairs it.

A check is a generator of findings, in the file of its family. `CHECKS` (`examine.py`) names all of them.
"""
