"""Alembic environment: runs migrations on the connection, and in the transaction, of `Database`."""

from alembic import context

from edgefl.storage.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
