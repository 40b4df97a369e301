"""Collector: a process of its own that makes a shard of what a board's sensors say."""
