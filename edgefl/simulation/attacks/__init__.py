"""Attacks on what a run shows of its boards' data: inversion of gradients, and inference of properties."""
