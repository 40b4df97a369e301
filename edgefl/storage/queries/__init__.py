"""Queries of the history: filters, rows, sums, pages."""
