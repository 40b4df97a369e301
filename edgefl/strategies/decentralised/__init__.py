"""Decentralised strategies: topology membership and the configurations of their methods."""
