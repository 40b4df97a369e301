"""Federated algorithms: who trains, how much, and how updates become the next model. Pure."""
