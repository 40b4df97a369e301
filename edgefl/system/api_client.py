"""Operator's client of the JSON API: coordinator URL, token, and verified requests.

`edgefl coordinator init` writes `~/.config/edgefl/operator.toml`; the file stands for itself and may be copied to
another machine. Files of other fleets lie beside it as `operator.FLEET.toml` and are found by their name or URL.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from edgefl.core.errors import ConfigError, NetworkError, NotAllowedError, NotFoundError, UsageError, WrongCaError
from edgefl.core.safe_parsing import format_toml, parse_json, parse_toml

if TYPE_CHECKING:
    from edgefl.core.types import Json

TIMEOUT_S = 30.0
MAX_REPLY_BYTES = 256 * 1024 * 1024

_FIELDS = ("url", "fleet", "ca_fingerprint", "ca_pem", "operator_token", "viewer_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFile:
    """Content of `operator.toml`; tokens stay out of the repr."""

    url: str
    fleet: str
    ca_fingerprint: str
    ca_pem: str = field(repr=False)
    operator_token: str = field(repr=False)
    viewer_token: str = field(default="", repr=False)

    @property
    def label(self) -> str:
        """Name that no other fleet has, whatever its owner calls it."""
        return f"{self.fleet}-{self.ca_fingerprint[:8]}"

    def to_toml(self) -> str:
        """Returns the TOML text."""
        return format_toml(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorClient:
    """Client of a coordinator's JSON API; every connection is verified against the fleet's own CA.

    `file` is the operator file that all this is from.
    """

    url: str
    ca_pem: str = field(repr=False)
    token: str = field(repr=False)
    file: Path | None = None

    @classmethod
    def from_options(cls, url: str | None = None) -> CoordinatorClient:
        """Returns the client for `--url`, else `EDGEFL_URL`, else the URL of `operator.toml`.

        `EDGEFL_FLEET` names the fleet whose file counts; `EDGEFL_TOKEN` replaces the file's token.

        Raises:
            NotAllowedError: there is no file, so neither CA nor token is known.
            NotFoundError: there is no such fleet.
            ConfigError: the file is damaged.
            UsageError: the URL is malformed.
        """
        requested_url = _validate_url(url or os.environ.get("EDGEFL_URL"))
        path = find_operator_path(requested_url)
        operator_file = load_operator_file(path)
        token = os.environ.get("EDGEFL_TOKEN") or operator_file.operator_token or operator_file.viewer_token
        return cls(url=requested_url or operator_file.url, ca_pem=operator_file.ca_pem, token=token, file=path)

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> Json:
        """Returns the JSON object at `path`; parameters that are None are left out.

        Raises:
            NotAllowedError: the token is missing or wrong.
            NetworkError: no answer, or a malformed one. Errors that the coordinator names are raised as themselves.
        """
        query = {key: value for key, value in (params or {}).items() if value is not None}
        return self._request("GET", f"{path}?{urlencode(query, doseq=True)}" if query else path)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Json:
        """Returns the JSON answer to a POST of `body`; raises as `get`."""
        return self._request("POST", path, body=json.dumps({"v": 1, **(body or {})}).encode())

    def download(self, path: str, into: IO[bytes]) -> None:
        """Downloads the file at `path` into an open file; raises as `get`."""
        from edgefl.system.https_client import download  # noqa: PLC0415 fast start

        status, reply = self._call(download, path, into)
        if status != 200:
            _parse_reply(self.url, status, reply)
            raise NetworkError(f"{self.url} answered {status} instead of a file")

    def upload(self, path: str, file: IO[bytes]) -> Json:
        """Returns the JSON answer to a POST of an open file, which is sent as it is read; raises as `get`."""
        size = os.fstat(file.fileno()).st_size
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        return self._request("POST", path, body=file, headers=headers)

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | IO[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        from edgefl.system.https_client import request  # noqa: PLC0415 fast start

        status, reply = self._call(request, method, path, body=body, headers=headers, max_bytes=MAX_REPLY_BYTES)
        return _parse_reply(self.url, status, reply)

    def _call(
        self,
        function: Callable[..., tuple[int, bytes]],
        *arguments: object,
        headers: Mapping[str, str] | None = None,
        **options: object,
    ) -> tuple[int, bytes]:
        """Returns status and body of a function of the HTTPS client, called with this address, CA and token."""
        from edgefl.system.https_client import create_pinned_context  # noqa: PLC0415 fast start

        all_headers = {"Authorization": f"Bearer {self.token}", **(headers or {})}
        with self._name_file():
            trust = create_pinned_context(self.ca_pem.encode())
            return function(
                _parse_address(self.url), trust, *arguments, headers=all_headers, timeout_s=TIMEOUT_S, **options
            )

    @contextlib.contextmanager
    def _name_file(self) -> Iterator[None]:
        """Adds to failures of a connection which operator file was used, and which other one would fit."""
        try:
            yield
        except WrongCaError as error:
            raise WrongCaError(f"{error}{self._explain_file(is_url_right=True)}") from None
        except NetworkError as error:
            raise NetworkError(f"{error}{self._explain_file(is_url_right=False)}") from None

    def _explain_file(self, *, is_url_right: bool) -> str:
        if self.file is None:
            return ""
        files = list_operator_files()
        others = [
            one for path, one in files.items() if path != self.file and (not is_url_right or one.url == self.url)
        ]
        fleet = files[self.file].fleet if self.file in files else "?"
        text = f"; the operator file is {self.file}, of fleet {fleet}"
        if not is_url_right:
            text += "; is its coordinator started? edgefl coordinator start"
        names = ", ".join(one.label for one in others)
        if not names:
            return text
        return f"{text}; {'this address has' if is_url_right else 'other fleets:'} {names}: edgefl fleet use NAME"


def format_resource_path(kind: str, name: str) -> str:
    """Returns the API's path of one run, device, model or user; `kind` is `runs`, `devices`, `models` or `users`.

    Raises:
        NotFoundError: the name cannot be part of a path.
    """
    if not name or "/" in name:
        raise NotFoundError(f"there is no {kind.removesuffix('s')} {name!r}; a name with a slash is found by its id")
    return f"/edgefl/v1/{kind}/{quote(name, safe='', errors='replace')}"


def is_coordinator_configured() -> bool:
    """Returns whether an operator file exists, or the environment names a coordinator."""
    return not {"EDGEFL_URL", "EDGEFL_FLEET"}.isdisjoint(os.environ) or bool(_list_paths())


def get_operator_path() -> Path:
    """Returns `~/.config/edgefl/operator.toml`, or its place under `XDG_CONFIG_HOME`."""
    config = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(config) / "edgefl" / "operator.toml"


def list_operator_files() -> dict[Path, OperatorFile]:
    """Returns this user's operator files, that of the fleet in use first, without damaged ones."""
    files = {}
    for path in _list_paths():
        with contextlib.suppress(ConfigError):
            files[path] = load_operator_file(path)
    return files


def find_fleet(name: str) -> Path:
    """Returns the operator file of the fleet that has this name or label.

    Raises:
        NotFoundError: there is none, or the name is that of several.
    """
    from edgefl.core.settings import suggest_name  # noqa: PLC0415 fast start

    files = list_operator_files()
    found = [path for path, one in files.items() if name in {one.fleet, one.label}]
    if len(found) == 1:
        return found[0]
    if found:
        raise NotFoundError(f"{name!r} are several fleets: {', '.join(files[path].label for path in found)}")
    hint = suggest_name(name, [one.fleet for one in files.values()])
    raise NotFoundError(f"there is no fleet {name!r}: {hint or '`edgefl fleet list` shows them'}")


def find_operator_path(url: str | None = None) -> Path:
    """Returns the operator file of `EDGEFL_FLEET`, else that of `url`, else `operator.toml`.

    Raises:
        NotAllowedError: there is none.
        NotFoundError: there is no such fleet.
        ConfigError: a file that was looked at is damaged.
    """
    if name := os.environ.get("EDGEFL_FLEET"):
        return find_fleet(name)
    files = _list_paths()
    if not files:
        raise NotAllowedError(
            f"{get_operator_path()} is missing; copy it from the machine where `edgefl coordinator init` ran"
        )
    fitting = [path for path in files if load_operator_file(path).url == url] if url is not None else []
    return (fitting or files)[0]


def find_operator_file(url: str | None = None) -> OperatorFile:
    """Returns the content of `find_operator_path`; raises as that."""
    return load_operator_file(find_operator_path(url))


def _list_paths() -> list[Path]:
    default = get_operator_path()
    return [path for path in (default, *sorted(default.parent.glob("operator.*.toml"))) if path.exists()]


def load_operator_file(path: Path) -> OperatorFile:
    """Returns one parsed operator file; raises `ConfigError` when it is damaged."""
    try:
        value = parse_toml(path.read_text())
        return OperatorFile(**{name: _require_text(value[name]) for name in _FIELDS})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); run again: edgefl coordinator init") from None


def _parse_reply(url: str, status: int, body: bytes) -> Json:
    from edgefl.core.protocol import error_from_code  # noqa: PLC0415 as above

    try:
        value = parse_json(body)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise NetworkError(f"{url} is no edgefl coordinator: it answered {status} without JSON")
    if status >= 400:
        if "error" in value:
            raise error_from_code(str(value["error"]), str(value.get("message", f"{url} answered {status}")))
        raise NetworkError(f"{url} answered {status}: {str(value.get('detail', 'no reason given'))[:200]}")
    return value


def _validate_url(url: str | None) -> str | None:
    if not url:
        return None
    try:
        parts = urlsplit(url.rstrip("/"))
        is_valid = parts.scheme == "https" and parts.hostname and not parts.path and (parts.port or 443)
    except ValueError:
        is_valid = None
    if not is_valid:
        raise UsageError(f"the coordinator's URL must be https://HOST:PORT, got {url!r}")
    return url.rstrip("/")


def _parse_address(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"[{host}]:{parts.port or 443}" if ":" in host else f"{host}:{parts.port or 443}"


def _require_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r}")
    return value
