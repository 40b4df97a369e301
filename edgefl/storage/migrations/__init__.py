"""Alembic migrations of the store; they only append."""
