"""Tensors to bytes and back. Pure NumPy."""
