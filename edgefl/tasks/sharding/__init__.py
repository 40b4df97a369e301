"""Partitioning of a data set into shards."""
