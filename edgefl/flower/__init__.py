"""Flower strategies in, edgefl strategies out to a plain Flower app."""
