"""Join file: data for unattended enrolment, on the boot partition or under /etc/edgefl."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Self

from edgefl.core.errors import ConfigError
from edgefl.core.protocol import JoinToken, validate_address, validate_slug
from edgefl.core.safe_parsing import parse_json

VERSION = 1
ROLES = ("trainer", "evaluator")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinFile:
    """Enrolment data of a board; `shards` maps a task to a path, `addresses` are tried first.

    The token's text stays out of the repr. `name` None means the host's name.
    """

    token: str = field(repr=False)
    name: str | None = None
    role: str = "trainer"
    shards: Mapping[str, str] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()

    def to_text(self) -> str:
        """Returns the JSON of the file."""
        return json.dumps({"v": VERSION, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the checked content.

        Raises:
            ConfigError: it is no join file; the message never shows the token.
            TokenInvalidError, UsageError: its token, name or an address is malformed.
        """
        try:
            value = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"the join file is not JSON: {error}") from None
        if not isinstance(value, dict) or value.pop("v", None) != VERSION:
            raise ConfigError(f'a join file is a JSON object with "v": {VERSION}; make it with edgefl provision')
        field_names = {item.name for item in fields(cls)}
        if unknown := set(value) - field_names:
            raise ConfigError(f"the join file has unknown entries: {', '.join(sorted(unknown))}")
        return cls._validate(value)

    @classmethod
    def _validate(cls, value: Mapping[str, object]) -> Self:
        token, name, role = value.get("token"), value.get("name"), value.get("role", "trainer")
        shards, addresses = value.get("shards", {}), value.get("addresses", [])
        if not isinstance(token, str):
            raise ConfigError("the join file has no token; make it with edgefl provision")
        JoinToken.parse(token)
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"the join file's name must be a text, got {name!r}")
        if role not in ROLES:
            raise ConfigError(f"the join file's role must be one of {', '.join(ROLES)}, got {role!r}")
        if not isinstance(shards, dict) or not all(isinstance(path, str) for path in shards.values()):
            raise ConfigError("the join file's shards must map tasks to paths")
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise ConfigError("the join file's addresses must be a list of HOST:PORT")
        return cls(
            token=token,
            name=None if name is None else validate_slug(name),
            role=str(role),
            shards=shards,
            addresses=tuple(validate_address(address) for address in addresses),
        )
