"""Decentralised learning without a server's model: topologies, edge schedules, gossip algorithms, and their messages.

Imports only `core`: no clock, no network, NumPy only, so that devices, tasks and the simulation use it. Begin with
`algorithm.py`; transport and time, real or simulated, belong to the caller.
"""
