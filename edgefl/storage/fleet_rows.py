"""Tokens, devices, what devices can do, and events."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from sqlalchemy import Connection, Row, delete, func, insert, select, update

from edgefl.errors import NameTakenError, NotFoundError, TokenExpiredError, TokenInvalidError, TokenUsedError
from edgefl.storage.database import Database
from edgefl.storage.models import Capabilities, Device, Event, Token
from edgefl.storage.plain import storable
from edgefl.storage.records import (
    CapabilitiesRecord,
    DeviceChanges,
    DeviceRecord,
    TokenRecord,
    VirtualDeviceRow,
)
from edgefl.storage.upsert import upsert


@dataclass(frozen=True, slots=True, kw_only=True)
class _Join:
    """Who asks to join, apart from the token."""

    device_id: str
    public_key: bytes
    role: str
    groups: tuple[str, ...]
    now: float
    certificate: Callable[[], str] | None
    version: str | None


class FleetRows:
    """The store's part about the fleet."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_token(  # noqa: PLR0913 one keyword per column
        self,
        *,
        token_id: str,
        secret_sha256: str,
        expires_at: float,
        uses: int,
        groups: Sequence[str] = (),
        role: str | None = None,
        created_at: float | None = None,
    ) -> None:
        """Keeps a new join token; `secret_sha256` is the hex hash of its secret."""
        row = {
            "token_id": token_id, "secret_sha256": secret_sha256, "expires_at": expires_at, "uses_left": uses,
            "groups": list(groups), "role": role, "created_at": created_at,
        }  # fmt: skip
        with self._database.write(durable=True) as connection:
            connection.execute(insert(Token), row)

    def add_virtual_devices(self, devices: Sequence[VirtualDeviceRow], *, at: float) -> None:
        """Keeps devices that a simulation stands in for: they never join, and have no key."""
        known = {
            "public_key": b"", "node_id": None, "joined_at": at, "removed_at": None, "last_seen_at": at,
            "presence": "simulated", "certificate_serial": None, "version": None,
        }  # fmt: skip
        rows = [
            {
                **known,
                "device_id": device.device_id,
                "role": device.role,
                "groups": list(device.groups),
                "examples": dict(device.examples),
            }
            for device in devices
        ]
        facts = [
            {"device_id": device.device_id, "at": at, "facts": storable(device.facts), "shards": {}}
            for device in devices
        ]
        with self._database.write(durable=True) as connection:
            upsert(connection, Device, rows, ("device_id",))
            if facts:
                connection.execute(insert(Capabilities), facts)

    def tokens(self) -> list[TokenRecord]:
        """Returns the tokens, without their secrets, oldest first."""
        with self._database.read() as connection:
            rows = connection.execute(select(Token.__table__).order_by(Token.created_at, Token.token_id)).all()
        return [
            TokenRecord(
                token_id=row.token_id, expires_at=row.expires_at, uses_left=row.uses_left, role=row.role,
                groups=tuple(row.groups), created_at=row.created_at,
            )
            for row in rows
        ]  # fmt: skip

    def remove_token(self, token_id: str) -> None:
        """Withdraws a token; devices that joined with it stay.

        Raises:
            NotFoundError: there is no such token.
        """
        with self._database.write(durable=True) as connection:
            if not connection.execute(delete(Token).where(Token.token_id == token_id)).rowcount:
                raise NotFoundError(f"no token {token_id!r}")

    def enroll_device(  # noqa: PLR0913 one keyword per fact of the request
        self,
        *,
        token_id: str,
        secret_sha256: str,
        now: float,
        device_id: str,
        public_key: bytes,
        role: str = "trainer",
        groups: Sequence[str] = (),
        certificate: Callable[[], str] | None = None,
        version: str | None = None,
    ) -> DeviceRecord:
        """Returns the device that joins with this token, in one durable transaction.

        The same name with the same key again costs no use, whatever became of the token since: the first answer
        was lost. The token's role goes before `role`; its groups are added to `groups`. `certificate` is called
        once the device may join and returns its certificate's serial.

        Raises:
            TokenInvalidError: no such token, or a wrong secret.
            TokenExpiredError: its lifetime is over.
            TokenUsedError: it has no uses left.
            NameTakenError: another device holds the name, or this key under another name.
        """
        join = _Join(
            device_id=device_id, public_key=public_key, role=role, groups=tuple(groups), now=now,
            certificate=certificate, version=version,
        )  # fmt: skip
        with self._database.write(durable=True) as connection:
            token = _checked_token(connection, token_id, secret_sha256)
            known = _device_row(connection, device_id)
            if known is not None and known.removed_at is None and known.public_key == public_key:
                return _renew(connection, join)
            _check_usable(token, now)
            _check_free(connection, join, known)
            connection.execute(update(Token).where(Token.token_id == token_id).values(uses_left=Token.uses_left - 1))
            return _admit(connection, join, token, rejoins=known is not None)

    def devices(self, *, removed: bool = False) -> list[DeviceRecord]:
        """Returns the devices of the fleet by name; with `removed`, also those that were removed."""
        query = select(Device.__table__).order_by(Device.device_id)
        if not removed:
            query = query.where(Device.removed_at.is_(None))
        with self._database.read() as connection:
            return [_device_record(row) for row in connection.execute(query)]

    def removed_devices(self) -> frozenset[str]:
        """Returns the names of devices that were removed, but for those that joined again."""
        with self._database.read() as connection:
            rows = connection.execute(select(Device.device_id).where(Device.removed_at.is_not(None)))
            return frozenset(row.device_id for row in rows)

    def device(self, device_id: str) -> DeviceRecord:
        """Returns one device, removed or not.

        Raises:
            NotFoundError: none was ever called that.
        """
        with self._database.read() as connection:
            row = _device_row(connection, device_id)
        if row is None:
            raise NotFoundError(f"no device {device_id!r}; `edgefl devices list` shows them")
        return _device_record(row)

    def set_node_id(self, device_id: str, node_id: int) -> None:
        """Remembers the Flower node id, so that it stays the same over restarts."""
        self._change(device_id, {"node_id": str(node_id)}, durable=True)

    def update_device(self, device_id: str, **changes: Unpack[DeviceChanges]) -> None:
        """Changes what is named and leaves the rest.

        Raises:
            NotFoundError: no such device.
        """
        values: dict[str, Any] = dict(changes)
        if "groups" in values:
            values["groups"] = list(values["groups"])
        if values:
            self._change(device_id, values, durable=not changes.keys() <= {"last_seen_at", "presence"})

    def remove_device(self, device_id: str, *, at: float) -> None:
        """Takes a device out of the fleet; its history stays and its name is free.

        Raises:
            NotFoundError: no such device.
        """
        self._change(device_id, {"removed_at": at, "presence": None}, durable=True)

    def record_capabilities(
        self, device_id: str, facts: Mapping[str, Any], shards: Mapping[str, Any], at: float
    ) -> bool:
        """Returns whether the report differs from the newest one; only then it becomes a row.

        Raises:
            NotFoundError: no such device.
        """
        facts, shards = storable(facts), storable(shards)
        with self._database.write() as connection:
            if _device_row(connection, device_id) is None:
                raise NotFoundError(f"no device {device_id!r}")
            newest = connection.execute(_newest_capabilities(device_id)).first()
            if newest is not None and (newest.facts, newest.shards) == (facts, shards):
                return False
            row = {"device_id": device_id, "at": at, "facts": facts, "shards": shards}
            connection.execute(insert(Capabilities), row)
        return True

    def capabilities(self) -> dict[str, CapabilitiesRecord]:
        """Returns the newest capabilities by device; a device that reported none is left out."""
        with self._database.read() as connection:
            rows = connection.execute(_newest_capabilities()).all()
        return {row.device_id: _capabilities_record(row) for row in rows}

    def capabilities_of(self, device_id: str) -> CapabilitiesRecord | None:
        """Returns a device's newest capabilities, None if it reported none."""
        with self._database.read() as connection:
            row = connection.execute(_newest_capabilities(device_id)).first()
        return None if row is None else _capabilities_record(row)

    def record_event(
        self,
        kind: str,
        message: str,
        *,
        at: float,
        run_id: str | None = None,
        device_id: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Remembers that something happened; `kind` is a slug such as `device-joined`."""
        row = {
            "at": at, "kind": kind, "message": storable(message), "run_id": run_id, "device_id": device_id,
            "data": storable(data or {}),
        }  # fmt: skip
        with self._database.write() as connection:
            connection.execute(insert(Event), row)

    def _change(self, device_id: str, values: Mapping[str, Any], *, durable: bool) -> None:
        with self._database.write(durable=durable) as connection:
            if not connection.execute(update(Device).where(Device.device_id == device_id).values(**values)).rowcount:
                raise NotFoundError(f"no device {device_id!r}; `edgefl devices list` shows them")


def _checked_token(connection: Connection, token_id: str, secret_sha256: str) -> Row[Any]:
    token = connection.execute(select(Token.__table__).where(Token.token_id == token_id)).first()
    # Compared even if there is none, so that the time taken says nothing about which ids exist.
    stored = token.secret_sha256 if token is not None else "0" * 64
    matches = hmac.compare_digest(stored.encode(), secret_sha256.encode())
    if token is None or not matches:
        raise TokenInvalidError("the coordinator knows no such token; make one with `edgefl coordinator token`")
    return token


def _check_usable(token: Row[Any], now: float) -> None:
    if now >= token.expires_at:
        raise TokenExpiredError(
            f"the token expired {now - token.expires_at:.0f} s ago; make one with `edgefl coordinator token`"
        )
    if token.uses_left < 1:
        raise TokenUsedError("the token has no uses left; make one with `edgefl coordinator token --uses N`")


def _check_free(connection: Connection, join: _Join, known: Row[Any] | None) -> None:
    if known is not None and known.removed_at is None:
        raise NameTakenError(f"another device is called {join.device_id!r}; choose another --name")
    holder = connection.execute(
        select(Device.device_id).where(
            Device.public_key == join.public_key, Device.removed_at.is_(None), Device.device_id != join.device_id
        )
    ).scalar()
    if holder is not None:
        raise NameTakenError(f"this device's key has already joined as {holder!r}; use that name")


def _admit(connection: Connection, join: _Join, token: Row[Any], *, rejoins: bool) -> DeviceRecord:
    values: dict[str, Any] = {
        "public_key": join.public_key, "node_id": None, "role": token.role or join.role,
        "groups": sorted({*token.groups, *join.groups}), "joined_at": join.now, "removed_at": None,
        "last_seen_at": join.now, "presence": None, **_issued(join), "examples": {},
    }  # fmt: skip
    if rejoins:
        connection.execute(update(Device).where(Device.device_id == join.device_id).values(**values))
    else:
        connection.execute(insert(Device), {"device_id": join.device_id, **values})
    return _read_device(connection, join.device_id)


def _renew(connection: Connection, join: _Join) -> DeviceRecord:
    if issued := _issued(join):
        connection.execute(update(Device).where(Device.device_id == join.device_id).values(**issued))
    return _read_device(connection, join.device_id)


def _issued(join: _Join) -> dict[str, Any]:
    issued = {"certificate_serial": join.certificate and join.certificate(), "version": join.version}
    return {name: value for name, value in issued.items() if value}


def _read_device(connection: Connection, device_id: str) -> DeviceRecord:
    return _device_record(connection.execute(select(Device.__table__).where(Device.device_id == device_id)).one())


def _device_row(connection: Connection, device_id: str) -> Row[Any] | None:
    return connection.execute(select(Device.__table__).where(Device.device_id == device_id)).first()


def _device_record(row: Row[Any]) -> DeviceRecord:
    values: dict[str, Any] = dict(row._mapping)  # noqa: SLF001 SQLAlchemy's public name for a row as a mapping
    values["node_id"] = None if row.node_id is None else int(row.node_id)
    values["groups"] = tuple(row.groups)
    return DeviceRecord(**values)


def _capabilities_record(row: Any) -> CapabilitiesRecord:
    return CapabilitiesRecord(device_id=row.device_id, at=row.at, facts=row.facts, shards=row.shards)


def _newest_capabilities(device_id: str | None = None) -> Any:
    """Returns a query for the newest row of every device, or of one of them alone."""
    newest = select(func.max(Capabilities.id)).group_by(Capabilities.device_id)
    if device_id is not None:
        newest = newest.where(Capabilities.device_id == device_id)
    return select(Capabilities.__table__).where(Capabilities.id.in_(newest))
