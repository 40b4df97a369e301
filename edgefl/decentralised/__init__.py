"""Learning without a server: who is whose neighbour, when an edge fires, what a node sends and what it makes of mail.

Pure: no clock, no network, NumPy only. Who carries the messages, and whether time is real, is up to others.
"""
