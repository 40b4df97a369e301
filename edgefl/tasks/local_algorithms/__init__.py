"""Local training on a shard: SGD and its variants, adaptive methods, SCAFFOLD.

Begin with `local_training.py`; an algorithm is a class that `registry.py` finds by name, for NumPy and torch alike.
"""
