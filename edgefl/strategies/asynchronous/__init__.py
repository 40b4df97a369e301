"""Asynchronous strategies, one paper a file."""
