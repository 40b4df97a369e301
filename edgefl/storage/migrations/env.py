"""What Alembic runs: migrations on the connection, and in the transaction, that `Database` hands over."""

from alembic import context

from edgefl.storage.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
