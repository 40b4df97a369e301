"""Entropy coding of index sets, levels and labels, for tensor and value stages."""
