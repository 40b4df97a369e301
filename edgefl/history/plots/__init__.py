"""Matplotlib sheets of the history, one file per family of figures; only `options` loads without it."""
