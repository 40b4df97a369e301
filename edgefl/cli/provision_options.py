"""What all ways of provisioning ask: who the board is, what it takes along, and its token."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from edgefl.errors import ConfigError, UsageError
from edgefl.protocol import JoinToken, checked_address, checked_slug

if TYPE_CHECKING:
    from edgefl.device.joining.join_file import JoinFile
    from edgefl.provision.card import Files

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])
_META = "edgefl.provision"
DEFAULT_PORT = 8000
_SHARD = re.compile(r"([a-z0-9][a-z0-9_.-]*)=(.+)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardToken:
    """A token and until when it lets in, if that is known here."""

    token: JoinToken
    expires: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardOptions:
    """The options of `board_options`, as they were given."""

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
    def given(cls) -> BoardOptions:
        """Returns the options of the command that runs."""
        return cls(**click.get_current_context().meta[_META])

    def one_name(self) -> str:
        """Returns the checked name of one board."""
        if self.name is None:
            raise UsageError("a board needs a name in the fleet: --name pi-01")
        return checked_slug(self.name)

    def tokens(self, count: int) -> list[BoardToken]:
        """Returns the token that was given, or new ones of one use each from the coordinator.

        Raises:
            UsageError: a token was given for several boards.
            TokenInvalidError: it is none. Errors of the operator's client pass.
        """
        if self.text or self.token_file:
            if count > 1:
                raise UsageError("several boards get a token each, made for them: leave --token away")
            text = self.text or _first(self.token_file)
            return [BoardToken(token=JoinToken.parse(text))]
        return [self._made() for _ in range(count)]

    def stand_in(self) -> BoardToken:
        """Returns what takes the place of a token where nothing is written."""
        empty = JoinToken(ca_fingerprint="0" * 64, token_id="0", secret="0", fleet="fleet")  # noqa: S106 opens nothing
        return BoardToken(token=empty)

    def join_file(self, name: str, token: JoinToken) -> JoinFile:
        """Returns the join file of a board."""
        from edgefl.device.joining.join_file import JoinFile  # noqa: PLC0415 fast start

        shards = self._shards()
        addresses = tuple(checked_address(address, DEFAULT_PORT) for address in self.addresses)
        return JoinFile(token=token.text(), name=name, role=self.role, shards=shards, addresses=addresses)

    def extras(self) -> Files:
        """Returns what the payload takes along, checked."""
        from edgefl.provision import drop_ins, extras  # noqa: PLC0415 fast start

        made: Files = {}
        made |= extras.wheels(self.wheels) if self.wheels else {}
        made |= extras.lock(self.lock) if self.lock else {}
        made |= {"keep-wheels": b""} if self.keeps_wheels else {}
        made["version"] = f"{extras.edgefl_version(made)}\n".encode()
        return made | extras.signers(self.signers) | drop_ins.shard_drop_ins(self._shards())

    def _shards(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for shard in self.shards:
            if (match := _SHARD.match(shard)) is None:
                raise UsageError(f"--shard must be TASK=PATH-ON-THE-BOARD, got {shard!r}")
            if match[1] in found:
                raise UsageError(f"--shard names {match[1]} twice; a board has one place for a task's data")
            found[match[1]] = match[2]
        return found

    def _made(self) -> BoardToken:
        from edgefl.client import Operator  # noqa: PLC0415 fast start

        wanted = {"ttl": self.ttl, "uses": 1, "groups": list(self.groups), "role": self.role}
        answer = Operator.from_options(self.url).post("/edgefl/v1/tokens", wanted)
        expires = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(float(answer["expires_at"])))
        return BoardToken(token=JoinToken.parse(str(answer["token"])), expires=expires)


def board_options(command: _Decorated) -> _Decorated:
    """Adds the options that every kind of board has; the command gets them from `BoardOptions.given`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _keep(context: click.Context, parameter: click.Parameter, value: object) -> None:
    context.meta.setdefault(_META, {})[parameter.name] = value


def _option(*names: str, **settings: Any) -> Callable[[_Decorated], _Decorated]:
    return click.option(*names, expose_value=False, callback=_keep, **settings)


_FILE = click.Path(path_type=Path, dir_okay=False)
_OPTIONS: Sequence[Callable[[Any], Any]] = (
    _option("--name", help="The device's name in the fleet; with --count a pattern, as in pi-{:02d}."),
    _option("--role", type=click.Choice(["trainer", "evaluator"]), default="trainer", show_default=True),
    _option("--shard", "shards", multiple=True, metavar="TASK=PATH", help="Data on the board; may be repeated."),
    _option(
        "--address", "addresses", multiple=True, metavar="HOST[:PORT]", help="Try the coordinator here first; repeat."
    ),
    _option("--token", "text", envvar="EDGEFL_JOIN_TOKEN", help="A token that exists [default: one is made]."),
    _option("--token-file", type=click.Path(path_type=Path, allow_dash=True), help="A file with it; - is the input."),
    _option("--ttl", default="24h", show_default=True, help="How long a token that is made lets in: 24h, 7d."),
    _option("--group", "groups", multiple=True, help="Put the board into this group; may be repeated."),
    _option("--url", metavar="URL", help="The coordinator that makes the token [default: operator.toml's]."),
    _option("--wheels", type=click.Path(path_type=Path, file_okay=False), help="edgefl's wheel, or all wheels."),
    _option("--lock", type=_FILE, help="A hash-pinned requirements file [default: the board's]."),
    _option(
        "--signer", "signers", multiple=True, type=_FILE, help="Public key whose releases it runs; may be repeated."
    ),
    _option(
        "--keep-wheels", "keeps_wheels", is_flag=True, help="Leave the wheels on the card after the installation."
    ),
)


def read_text(file: IO[str], what: str, *, at_most: int) -> str:
    """Returns the text of an open file.

    Raises:
        ConfigError: it is no text, or longer than `at_most` characters; the message shows nothing of it.
    """
    try:
        text = file.read(at_most + 1)
    except UnicodeDecodeError:
        raise ConfigError(f"{what} is no text") from None
    if len(text) > at_most:
        raise ConfigError(f"{what} is longer than {at_most} characters")
    return text


def _first(path: Path | None) -> str:
    assert path is not None
    try:
        with click.open_file(str(path)) as file:
            return read_text(file, f"the token file {path}", at_most=8192)
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be read: {error.strerror}") from None
