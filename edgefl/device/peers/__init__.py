"""Peer-to-peer side of decentralised training: gossip sessions and message transports."""
