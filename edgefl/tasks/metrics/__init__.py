"""Built-in metrics, as sums that batches, devices and rounds add up.

Begin with `registry.py`, which makes a metric by its name. `predictions.py` and `exact_sums.py` are what they share.
"""
