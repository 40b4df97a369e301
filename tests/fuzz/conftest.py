"""Readers are made once for all tests of a process: some of them open a whole coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
from fuzz.reader import Reader
from fuzz.readers import READERS


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Reader]]:
    readers: list[Reader] = []

    @cache
    def make(name: str) -> Reader:
        readers.append(READERS[name].make(tmp_path_factory.mktemp(name)))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()
