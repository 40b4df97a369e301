"""Builds the objects of a run from its run file."""
