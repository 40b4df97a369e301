"""A store for what is read from a history and drawn of it."""

import pytest

from edgefl.storage.store import Store


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "edgefl.db") as opened:
        yield opened
