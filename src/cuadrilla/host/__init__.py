"""What this machine is: its facts, its devices and how busy it is. Nothing here imports torch into this process."""
