"""Execution of instructions: live fleet, journal replay, admission, model distribution."""
