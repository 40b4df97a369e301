"""Secure aggregation: the coordinator learns the sum of a round's updates, and no single one.

Both sides of the protocol of Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning,
CCS 2017, in the version against an active coordinator (Figure 4, with its consistency check). No clock, no network.
"""
