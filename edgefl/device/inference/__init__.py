"""Finished models on a board: fetched, judged, kept, and run without torch."""
