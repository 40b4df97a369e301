"""Options common to all ways of provisioning: the device, its payload, and its token."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import click

from edgefl.cli.sources import FILE_TYPE, FOLDER_TYPE, fleet_option, make_client, warn_visible_secret
from edgefl.core.errors import ConfigError, UsageError
from edgefl.core.protocol import JoinToken, validate_address, validate_slug
from edgefl.device.enrolment.join_file import JoinFile
from edgefl.provision.payload import load_extras, render_shard_drop_ins
from edgefl.provision.provisioning_files import FileContents

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])
_META_KEY = "edgefl.provision"
DEFAULT_PORT = 8000
_SHARD_PATTERN = re.compile(r"([a-z0-9][a-z0-9_.-]*)=(.+)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedToken:
    """A token and the end of its validity, if that is known here."""

    token: JoinToken
    expires: str | None = None

    def format_expiry(self) -> str:
        """Returns the end of a line about what holds the token."""
        return f"; its token lets one board in until {self.expires}" if self.expires else ""


PLACEHOLDER_TOKEN = IssuedToken(
    token=JoinToken(ca_fingerprint="0" * 64, token_id="0", secret="0", fleet="fleet")  # noqa: S106 a placeholder
)
"""Token of a card that is rendered to be checked and not written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionOptions:
    """The options of `board_options`, as given."""

    name: str | None
    role: str
    shards: tuple[str, ...]
    addresses: tuple[str, ...]
    text: str | None
    token_file: Path | None
    ttl: str
    groups: tuple[str, ...]
    url: str | None
    wheels: Path | None
    lock: Path | None
    signers: tuple[Path, ...]
    keeps_wheels: bool

    @classmethod
    def from_context(cls) -> ProvisionOptions:
        """Returns the options of the running command."""
        return cls(**click.get_current_context().meta[_META_KEY])

    def get_single_name(self) -> str:
        """Returns the validated name of one device."""
        if self.name is None:
            raise UsageError("a board needs a name in the fleet: --name pi-01")
        return validate_slug(self.name)

    def get_token(self) -> IssuedToken:
        """Returns the given token, or a new single-use one from the coordinator; raises as `get_tokens`."""
        return self.get_tokens(1)[0]

    def get_tokens(self, count: int) -> list[IssuedToken]:
        """Returns the given token, or new single-use ones from the coordinator.

        Raises:
            UsageError: a token was given for several devices.
            TokenInvalidError: it is no token. Errors of the operator's client pass.
        """
        if self.text or self.token_file:
            if count > 1:
                raise UsageError("several boards get a token each, made for them: leave --token away")
            text = read_token(self.token_file) if self.token_file else self.text or ""
            return [IssuedToken(token=JoinToken.parse(text))]
        return [self._issue_token() for _ in range(count)]

    def make_join_file(self, name: str, token: JoinToken) -> JoinFile:
        """Returns the join file of a device."""
        shards = self._parse_shards()
        addresses = tuple(validate_address(address, DEFAULT_PORT) for address in self.addresses)
        return JoinFile(token=token.text(), name=name, role=self.role, shards=shards, addresses=addresses)

    def load_extras(self) -> FileContents:
        """Returns the payload's validated extra files."""
        files, _ = load_extras(self.wheels, self.lock, self.signers)
        mark = {"keep-wheels": b""} if self.keeps_wheels else {}
        return files | mark | render_shard_drop_ins(self._parse_shards())

    def _parse_shards(self) -> dict[str, str]:
        shards: dict[str, str] = {}
        for shard in self.shards:
            if (match := _SHARD_PATTERN.match(shard)) is None:
                raise UsageError(f"--shard must be TASK=PATH-ON-THE-BOARD, got {shard!r}")
            if match[1] in shards:
                raise UsageError(f"--shard names {match[1]} twice; a board has one place for a task's data")
            shards[match[1]] = match[2]
        return shards

    def _issue_token(self) -> IssuedToken:
        request = {"ttl": self.ttl, "uses": 1, "groups": list(self.groups), "role": self.role}
        answer = make_client(self.url).post("/edgefl/v1/tokens", request)
        expires = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(float(answer["expires_at"])))
        return IssuedToken(token=JoinToken.parse(str(answer["token"])), expires=expires)


def board_options(command: _Decorated) -> _Decorated:
    """Adds the options common to all kinds of devices; see `ProvisionOptions.from_context`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _save_option(context: click.Context, parameter: click.Parameter, value: object) -> None:
    if parameter.name == "text":
        warn_visible_secret(context, parameter, None if value is None else str(value))
    context.meta.setdefault(_META_KEY, {})[parameter.name] = value


def _make_option(*names: str, **settings: Any) -> Callable[[_Decorated], _Decorated]:
    return click.option(*names, expose_value=False, callback=_save_option, **settings)


_OPTIONS: Sequence[Callable[[Any], Any]] = (
    _make_option("--name", help="The device's name in the fleet; with --count a pattern, as in pi-{:02d}."),
    _make_option("--role", type=click.Choice(["trainer", "evaluator"]), default="trainer", show_default=True),
    _make_option("--shard", "shards", multiple=True, metavar="TASK=PATH", help="Data on the board; may be repeated."),
    _make_option(
        "--address", "addresses", multiple=True, metavar="HOST[:PORT]", help="Try the coordinator here first; repeat."
    ),
    _make_option("--token", "text", envvar="EDGEFL_JOIN_TOKEN", help="A token that exists [default: one is made]."),
    _make_option(
        "--token-file", type=click.Path(path_type=Path, allow_dash=True), help="A file with it; - is the input."
    ),
    _make_option("--ttl", default="24h", show_default=True, help="How long a token that is made lets in: 24h, 7d."),
    _make_option("--group", "groups", multiple=True, help="Put the board into this group; may be repeated."),
    _make_option("--url", metavar="URL", help="The coordinator that makes the token [default: operator.toml's]."),
    fleet_option,
    _make_option("--wheels", type=FOLDER_TYPE, help="edgefl's wheel, or all wheels."),
    _make_option("--lock", type=FILE_TYPE, help="A hash-pinned requirements file [default: the board's]."),
    _make_option(
        "--signer",
        "signers",
        multiple=True,
        type=FILE_TYPE,
        help="Public key whose releases it runs; may be repeated.",
    ),
    _make_option(
        "--keep-wheels", "keeps_wheels", is_flag=True, help="Leave the wheels on the card after the installation."
    ),
)


def read_text(file: IO[str], description: str, *, max_chars: int) -> str:
    """Returns the text of an open file.

    Raises:
        ConfigError: it is no text, or longer than `max_chars` characters; the message contains nothing of it.
    """
    try:
        text = file.read(max_chars + 1)
    except UnicodeDecodeError:
        raise ConfigError(f"{description} is no text") from None
    if len(text) > max_chars:
        raise ConfigError(f"{description} is longer than {max_chars} characters")
    return text


def read_token(path: Path) -> str:
    """Returns the text of a token file; `-` is the standard input. Raises `ConfigError` when it cannot be read."""
    try:
        with click.open_file(str(path)) as file:
            return read_text(file, f"the token file {path}", max_chars=8192)
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be read: {error.strerror}") from None
