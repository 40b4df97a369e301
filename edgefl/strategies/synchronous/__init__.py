"""Synchronous strategies, one paper a file."""
