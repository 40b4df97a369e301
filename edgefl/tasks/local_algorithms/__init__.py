"""Local training on a shard: SGD and its variants, SCAFFOLD, adaptive methods."""
