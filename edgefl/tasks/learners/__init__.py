"""Models in memory, ready to train: NumPy and torch."""
