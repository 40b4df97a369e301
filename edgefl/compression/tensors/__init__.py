"""Tensor stages: which numbers of a model travel. One family a file, beside the mathematics it needs."""
