"""Runs from the queue to their end: validation, planning, scheduling, history, checkpoints and resuming."""
