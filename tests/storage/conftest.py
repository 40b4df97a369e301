import pytest
from filled_store import FilledStore


@pytest.fixture
def store(tmp_path):
    with FilledStore.open(tmp_path / "edgefl.db") as opened:
        yield opened


@pytest.fixture
def run_id(store):
    return store.submit("run-1")
