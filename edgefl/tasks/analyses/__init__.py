"""Analyses: what a board sums over its examples, and what the coordinator makes of all boards' sums."""
