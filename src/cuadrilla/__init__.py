"""cuadrilla: one PyTorch model, trained on all the machines you already own."""

__version__ = "0.1.0"
