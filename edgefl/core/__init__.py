"""Shared types, errors, run configuration, wire protocol, and safe parsing."""
