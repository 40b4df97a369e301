"""Federated learning for fleets of single-board computers."""

__version__ = "0.1.0"
