"""Data files: shards and how data sets are cut into them, array files of others, updates to measure codecs on.

Begin with `shards.py`, what a device reads; `central.py` cuts shards from a data set by a scheme of
`partitioning.py`.
"""
