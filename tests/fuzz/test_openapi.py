"""The operator's API against its own OpenAPI description: requests that fit it, and requests that nearly do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import schemathesis
from fastapi import FastAPI
from fuzz.api_readers import Port, open_coordinator, port_of
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode


class Api:
    """A coordinator's port, what it says of itself, and the token to ask it with."""

    def __init__(self, folder: Path) -> None:
        coordinator, token = open_coordinator(folder)
        self.port: Port = port_of(coordinator)
        self.schema = schemathesis.openapi.from_dict(_fastapi_in(self.port.app).openapi())
        self.headers = [(b"authorization", f"Bearer {token}".encode()), (b"content-type", b"application/json")]

    def ask(self, case: Any) -> tuple[int, bytes]:
        path = case.path
        for name, value in (case.path_parameters or {}).items():
            path = path.replace(f"{{{name}}}", str(value))
        query = urlencode(case.query or {}, doseq=True, errors="replace").encode()
        is_none, is_raw = isinstance(case.body, schemathesis.core.NotSet), isinstance(case.body, bytes)
        body = b"" if is_none else case.body if is_raw else json.dumps(case.body).encode()
        return self.port.ask(case.method.upper(), quote(path, errors="replace").encode(), query, self.headers, body)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    made = Api(tmp_path_factory.mktemp("api"))
    yield made
    made.port.close()


@pytest.mark.parametrize("num_requests", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_what_the_description_allows_and_what_it_forbids_never_ends_in_an_internal_error(
    api: Api, num_requests: int
) -> None:
    """Asks for each operation so many times in each mode."""
    operations = [found.ok() for found in api.schema.get_all_operations()]
    assert len(operations) > 30
    for operation in operations:
        if operation.path.endswith("/feed"):
            continue  # goes on for ever
        # A part of the path is any text, so that nothing can be wrong with it.
        may_be_wrong = [one for one in operation.iter_parameters() if one.location != "path"] or [*operation.body]
        for mode in GenerationMode if may_be_wrong else [GenerationMode.POSITIVE]:

            @settings(
                max_examples=num_requests, deadline=None, database=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                status, answer = api.ask(case)
                assert status < 500, (case.method, case.path, case.query, case.body, answer[:300])

            ask()


def _fastapi_in(app: Any) -> FastAPI:
    """The FastAPI application that lies under what counts, caps and checks its requests."""
    todo = [app]
    while todo:
        found = todo.pop()
        if isinstance(found, FastAPI):
            return found
        todo += [cell.cell_contents for cell in getattr(found, "__closure__", None) or ()]
    raise AssertionError("there is no FastAPI application")
