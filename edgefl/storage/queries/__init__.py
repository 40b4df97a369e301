"""Queries of the history: `history` for its rows, `dashboard` for the page; `columns` loads without SQLAlchemy."""
