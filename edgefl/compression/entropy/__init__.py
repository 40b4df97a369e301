"""Entropy coding of index sets, levels and labels, for tensor and value stages; and Zstandard, the lossless stages.

Begin with `indices.py`. `golomb.py` packs whole arrays of integers at a time, and uses nothing but the wire's reader.
"""
