import pytest
from filled_store import FilledStore
from postgres_server import running_postgres


@pytest.fixture(scope="session")
def postgres():
    """A server, and the name of a database in it that holds an empty store."""
    with running_postgres() as server:
        first = server.new_database()
        FilledStore.open(server.url(first)).close()
        yield server, first


@pytest.fixture
def store(tmp_path):
    with FilledStore.open(tmp_path / "edgefl.db") as opened:
        yield opened


@pytest.fixture
def run_id(store):
    return store.submit("run-1")
