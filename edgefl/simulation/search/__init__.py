"""Search over settings: spaces, who proposes the next trial, and early stopping of runs that are behind."""
