"""A fleet as an object, for notebooks and for the command line: boards, runs, history and models."""
