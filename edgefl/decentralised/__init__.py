"""Decentralised learning: topologies, edge schedules, and gossip algorithms with their messages.

Pure: no clock, no network, NumPy only. Message transport and time, real or simulated, belong to the caller.
"""
