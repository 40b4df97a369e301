"""Tensor stages: selection of the sent entries of a model. One family a file, beside its mathematics."""
