from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import Request

from edgefl.coordinator.auth import error_response, is_loopback, require_operator, require_viewer
from edgefl.coordinator.directory import CoordinatorDirectory, add_access_tokens, init_directory
from edgefl.core.errors import (
    ConfigError,
    EdgeflError,
    NameTakenError,
    NotAllowedError,
    NotFoundError,
    StoreFullError,
    TokenUsedError,
    VersionError,
)


def _request(authorization: str | None) -> Request:
    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    return Request({"type": "http", "method": "GET", "path": "/x", "headers": headers})


@pytest.fixture
def granted(tmp_path: Path) -> tuple[CoordinatorDirectory, str, str]:
    return add_access_tokens(init_directory(tmp_path / "c"))


def test_an_operator_may_do_everything(granted: tuple[CoordinatorDirectory, str, str]) -> None:
    directory, operator, _ = granted
    require_operator(directory)(_request(f"Bearer {operator}"))
    require_viewer(directory, listen_host="0.0.0.0")(_request(f"bearer {operator}"))


def test_a_viewer_reads_only(granted: tuple[CoordinatorDirectory, str, str]) -> None:
    directory, _, viewer = granted
    require_viewer(directory, listen_host="192.168.1.5")(_request(f"Bearer {viewer}"))
    with pytest.raises(NotAllowedError, match="operator token"):
        require_operator(directory)(_request(f"Bearer {viewer}"))


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic eDp5", "Bearer wrong", "Bearer \xff"])
def test_everybody_else_is_refused(granted: tuple[CoordinatorDirectory, str, str], header: str | None) -> None:
    for guard in (require_operator(granted[0]), require_viewer(granted[0], listen_host="0.0.0.0")):
        with pytest.raises(NotAllowedError):
            guard(_request(header))


def test_a_stored_hash_is_no_token(granted: tuple[CoordinatorDirectory, str, str]) -> None:
    with pytest.raises(NotAllowedError):
        require_operator(granted[0])(_request(f"Bearer {granted[0].operator_sha256[0]}"))


def test_on_loopback_everybody_reads_and_nobody_changes(granted: tuple[CoordinatorDirectory, str, str]) -> None:
    require_viewer(granted[0], listen_host="127.0.0.1")(_request(None))
    with pytest.raises(NotAllowedError):
        require_operator(granted[0])(_request(None))


def test_a_directory_without_tokens_lets_nobody_in(tmp_path: Path) -> None:
    with pytest.raises(NotAllowedError):
        require_operator(init_directory(tmp_path / "c"))(_request("Bearer x"))


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), ("pi.local", False)],
)
def test_only_loopback_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotAllowedError("x"), 401),
        (TokenUsedError("x"), 403),
        (NotFoundError("x"), 404),
        (NameTakenError("x"), 409),
        (VersionError("x"), 426),
        (StoreFullError("x"), 503),
        (ConfigError("x"), 400),
    ],
)
def test_every_error_has_its_status(error: EdgeflError, status: int) -> None:
    assert error_response(error).status_code == status
