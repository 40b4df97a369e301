"""Advice on a run file: which strategy, codec and local work cost a fleet least, and why."""
