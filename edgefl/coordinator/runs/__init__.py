"""Runs from the queue to their end: planning, the worker, the history they write, what is kept of them, resuming."""
