"""Decentralised training: the node that a device is, and what brings its messages to its neighbours."""
