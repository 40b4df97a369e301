"""Diagnostics of a board: checks, log, and a shareable report without secrets."""
