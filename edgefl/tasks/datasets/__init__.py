"""Data files: shards, NumPy and IDX files, and sources of central data."""
