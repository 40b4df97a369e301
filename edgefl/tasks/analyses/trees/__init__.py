"""Boosted trees whose splits are chosen from sums over all boards."""
