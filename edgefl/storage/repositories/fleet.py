"""Repository of users, tokens, devices, capabilities, and events."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Unpack

from sqlalchemy import ColumnElement, Connection, Row, func, insert, select, update

from edgefl.core.errors import NameTakenError, NotFoundError, TokenExpiredError, TokenInvalidError, TokenUsedError
from edgefl.core.types import SUPERNODE
from edgefl.storage.database import Repository
from edgefl.storage.repositories.records import (
    CapabilitiesRecord,
    DevicePatch,
    SimulatedDeviceRow,
    StoredDevice,
    TokenRecord,
    UserRecord,
)
from edgefl.storage.repositories.row_writing import to_storable, upsert
from edgefl.storage.tables import AuditTable, CapabilitiesTable, DeviceTable, EventTable, TokenTable, UserTable

_USER_COLUMNS = ("name", "role", "created_at", "expires_at", "revoked_at")
_USER_QUERY = select(*(UserTable.__table__.c[name] for name in _USER_COLUMNS))


class FleetRepository(Repository):
    """The store's methods on the fleet."""

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
        """Adds a join token; `secret_sha256` is the hex hash of its secret."""
        row = {
            "token_id": token_id, "secret_sha256": secret_sha256, "expires_at": expires_at, "uses_left": uses,
            "groups": list(groups), "role": role, "created_at": created_at,
        }  # fmt: skip
        with self.database.write(durable=True) as connection:
            connection.execute(insert(TokenTable), row)

    def check_token(self, token_id: str, secret_sha256: str, *, now: float) -> None:
        """Checks that a join token exists and is not over; one without uses left is accepted.

        Raises:
            TokenInvalidError: no such token, or a wrong secret.
            TokenExpiredError: its lifetime is over.
        """
        with self.database.read() as connection:
            _check_token_lifetime(_verify_token(connection, token_id, secret_sha256), now)

    def add_user(self, user: UserRecord, *, token_sha256: str | None, now: float) -> None:
        """Adds a person, in place of one of the same name who may do nothing any more.

        Args:
            user: who, with which role, until when.
            token_sha256: hex hash of the access token; None for one who signs in at an OpenID provider.
            now: Unix seconds.

        Raises:
            NameTakenError: somebody who may do something has this name.
        """
        row = asdict(user) | {"token_sha256": token_sha256}
        with self.database.write(durable=True) as connection:
            former = _find_user(connection, UserTable.name == user.name)
            if former is not None and former.is_active(now):
                raise NameTakenError(
                    f"there is a user {user.name!r} already; revoke that one first, or take another name"
                )
            upsert(connection, UserTable, [row], ("name",))

    def list_users(self) -> list[UserRecord]:
        """Returns all people by name, revoked ones too."""
        return [_to_user(row) for row in self.database.read_rows(_USER_QUERY.order_by(UserTable.name))]

    def find_user(self, *, name: str | None = None, token_sha256: str | None = None) -> UserRecord | None:
        """Returns the person of this name, or with this token, active or not; None if there is none."""
        where = UserTable.name == name if name is not None else UserTable.token_sha256 == token_sha256
        with self.database.read() as connection:
            return _find_user(connection, where)

    def admit_user(self, name: str, role: str, *, now: float) -> UserRecord:
        """Returns the person whom an OpenID provider knows by this name, added or with this role from now on.

        One who is revoked or expired stays as stored.
        """
        with self.database.write(durable=True) as connection:
            user = _find_user(connection, UserTable.name == name)
            if user is None:
                user = UserRecord(name=name, role=role, created_at=now)
                connection.execute(insert(UserTable), asdict(user))
            elif user.is_active(now) and user.role != role:
                user = replace(user, role=role)
                connection.execute(update(UserTable).where(UserTable.name == name).values(role=role))
        return user

    def revoke_user(self, name: str, *, at: float) -> None:
        """Takes every right of a person away, from this moment on.

        Raises:
            NotFoundError: there is nobody of this name, or that one is revoked already.
        """
        query = update(UserTable).where(UserTable.name == name, UserTable.revoked_at.is_(None))
        with self.database.write(durable=True) as connection:
            if not connection.execute(query.values(revoked_at=at)).rowcount:
                raise NotFoundError(f"there is no active user {name!r}; `edgefl coordinator user list` shows them")

    def add_simulated_devices(self, devices: Sequence[SimulatedDeviceRow], *, at: float) -> None:
        """Adds the devices of a simulation: they never join, and have no key."""
        shared_values = {
            "public_key": b"", "node_id": None, "joined_at": at, "removed_at": None, "last_seen_at": at,
            "presence": "simulated", "certificate_serial": None, "version": None,
        }  # fmt: skip
        rows = [
            {
                **shared_values,
                "device_id": device.device_id,
                "role": device.role,
                "groups": list(device.groups),
                "examples": dict(device.examples),
            }
            for device in devices
        ]
        facts = [
            {"device_id": device.device_id, "at": at, "facts": to_storable(device.facts), "shards": {}}
            for device in devices
        ]
        with self.database.write(durable=True) as connection:
            upsert(connection, DeviceTable, rows, ("device_id",))
            if facts:
                connection.execute(insert(CapabilitiesTable), facts)

    def list_tokens(self) -> list[TokenRecord]:
        """Returns the tokens, without their secrets, oldest first."""
        query = select(TokenTable.__table__).order_by(TokenTable.created_at, TokenTable.token_id)
        return [
            TokenRecord(
                token_id=row.token_id, expires_at=row.expires_at, uses_left=row.uses_left, role=row.role,
                groups=tuple(row.groups), created_at=row.created_at,
            )
            for row in self.database.read_rows(query)
        ]  # fmt: skip

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
        issue_certificate: Callable[[], str] | None = None,
        version: str | None = None,
    ) -> StoredDevice:
        """Enrols a device with a token in one durable transaction, and returns it.

        The same name with the same key again costs no use, whatever the token's state: the first answer was lost.
        The token's role takes precedence over `role`, which is never the device's own wish; its groups are added to
        `groups`. `issue_certificate` is called once the device may join and returns its certificate's serial.

        Raises:
            TokenInvalidError: no such token, or a wrong secret.
            TokenExpiredError: its lifetime is over.
            TokenUsedError: it has no uses left.
            NameTakenError: another device holds the name, or this key under another name.
        """
        with self.database.write(durable=True) as connection:
            token = _verify_token(connection, token_id, secret_sha256)
            row = _find_device_row(connection, device_id)
            is_member = row is not None and row.removed_at is None
            is_repetition = row is not None and is_member and row.public_key == public_key and row.role != SUPERNODE
            if not is_repetition:
                _check_token_usable(token, now)
                if is_member:
                    raise NameTakenError(f"another device is called {device_id!r}; choose another --name")
                if (holder := find_key_holder(connection, public_key, device_id)) is not None:
                    raise NameTakenError(f"this device's key has already joined as {holder!r}; use that name")
                connection.execute(
                    update(TokenTable)
                    .where(TokenTable.token_id == token_id)
                    .values(uses_left=TokenTable.uses_left - 1)
                )
            issued = {"certificate_serial": issue_certificate and issue_certificate(), "version": version}
            values: dict[str, Any] = {name: value for name, value in issued.items() if value}
            if not is_repetition:
                values |= {
                    "public_key": public_key, "node_id": None, "role": token.role or role,
                    "groups": sorted({*token.groups, *groups}), "joined_at": now, "removed_at": None,
                    "last_seen_at": now, "presence": None, "examples": {},
                }  # fmt: skip
            if row is None:
                connection.execute(insert(DeviceTable), {"device_id": device_id, **values})
            elif values:
                connection.execute(update(DeviceTable).where(DeviceTable.device_id == device_id).values(**values))
        return self.get_device(device_id)

    def add_supernode(
        self,
        device_id: str,
        public_key: bytes,
        *,
        groups: Sequence[str],
        examples: Mapping[str, int],
        at: float,
    ) -> None:
        """Adds a stock SuperNode of Flower; `examples` names the jobs that it takes part in.

        Raises:
            NameTakenError: a device of the fleet has this name, or this key.
        """
        values: dict[str, Any] = {
            "public_key": public_key, "node_id": None, "role": SUPERNODE, "groups": sorted(set(groups)),
            "joined_at": at, "removed_at": None, "last_seen_at": None, "presence": None, "examples": dict(examples),
            "certificate_serial": None, "version": None,
        }  # fmt: skip
        with self.database.write(durable=True) as connection:
            row = _find_device_row(connection, device_id)
            if row is not None and row.removed_at is None:
                raise NameTakenError(
                    f"a device is called {device_id!r} already; choose another name, or take it out first: "
                    f"edgefl devices remove {device_id}"
                )
            if (holder := find_key_holder(connection, public_key, device_id)) is not None:
                raise NameTakenError(f"this key is that of {holder!r}; make another one")
            if row is None:
                connection.execute(insert(DeviceTable), {"device_id": device_id, **values})
            else:
                connection.execute(update(DeviceTable).where(DeviceTable.device_id == device_id).values(**values))

    def list_devices(self, *, include_removed: bool = False) -> list[StoredDevice]:
        """Returns the devices of the fleet by name; with `include_removed`, also removed ones."""
        query = select(DeviceTable.__table__).order_by(DeviceTable.device_id)
        if not include_removed:
            query = query.where(DeviceTable.removed_at.is_(None))
        return [_to_stored_device(row) for row in self.database.read_rows(query)]

    def list_removed_device_ids(self) -> frozenset[str]:
        """Returns the names of removed devices that have not joined again."""
        query = select(DeviceTable.device_id).where(DeviceTable.removed_at.is_not(None))
        return frozenset(row.device_id for row in self.database.read_rows(query))

    def get_device(self, device_id: str) -> StoredDevice:
        """Returns one device, removed or not.

        Raises:
            NotFoundError: no device ever had this name.
        """
        with self.database.read() as connection:
            return _to_stored_device(_get_device_row(connection, device_id))

    def set_node_id(self, device_id: str, node_id: int) -> None:
        """Stores the Flower node id, so that it stays the same over restarts."""
        self._update_device(device_id, {"node_id": str(node_id)}, durable=True)

    def update_device(self, device_id: str, **changes: Unpack[DevicePatch]) -> None:
        """Updates the named values only.

        Raises:
            NotFoundError: no such device.
        """
        values: dict[str, Any] = dict(changes)
        if "groups" in values:
            values["groups"] = list(values["groups"])
        if values:
            self._update_device(device_id, values, durable=not changes.keys() <= {"last_seen_at", "presence"})

    def remove_device(self, device_id: str, *, at: float) -> None:
        """Removes a device from the fleet; its history stays and its name is free.

        Raises:
            NotFoundError: no such device.
        """
        self._update_device(device_id, {"removed_at": at, "presence": None}, durable=True)

    def record_capabilities(
        self, device_id: str, facts: Mapping[str, Any], shards: Mapping[str, Any], at: float
    ) -> bool:
        """Records a capability report that differs from the newest one; returns whether it does.

        Raises:
            NotFoundError: no such device.
        """
        facts, shards = to_storable(facts), to_storable(shards)
        with self.database.write() as connection:
            _get_device_row(connection, device_id)
            newest = connection.execute(_build_newest_capabilities_query(device_id)).first()
            if newest is not None and (newest.facts, newest.shards) == (facts, shards):
                return False
            row = {"device_id": device_id, "at": at, "facts": facts, "shards": shards}
            connection.execute(insert(CapabilitiesTable), row)
        return True

    def get_all_capabilities(self) -> dict[str, CapabilitiesRecord]:
        """Returns the newest capabilities by device; devices without a report are absent."""
        rows = self.database.read_rows(_build_newest_capabilities_query())
        return {row.device_id: _to_capabilities_record(row) for row in rows}

    def get_capabilities(self, device_id: str) -> CapabilitiesRecord | None:
        """Returns a device's newest capabilities, None if it reported none."""
        rows = self.database.read_rows(_build_newest_capabilities_query(device_id))
        return _to_capabilities_record(rows[0]) if rows else None

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
        """Records an event; `kind` is a slug such as `device-joined`."""
        row = {
            "at": at, "kind": kind, "message": to_storable(message), "run_id": run_id, "device_id": device_id,
            "data": to_storable(data or {}),
        }  # fmt: skip
        with self.database.write() as connection:
            connection.execute(insert(EventTable), row)

    def record_audit(self, *, actor: str, source: str, action: str, outcome: str, at: float) -> None:
        """Adds an action to the audit trail, durably; nothing changes or deletes its rows.

        Args:
            actor: who acted.
            source: an address, or `local` for a command on the coordinator's machine.
            action: a method and a path of the API, or a command.
            outcome: `done`, `refused` or `failed` with a status.
            at: Unix seconds.
        """
        row = {"at": at, "actor": actor, "source": source, "action": action, "outcome": outcome}
        with self.database.write(durable=True) as connection:
            connection.execute(insert(AuditTable), to_storable(row))

    def _update_device(self, device_id: str, values: Mapping[str, Any], *, durable: bool) -> None:
        with self.database.write(durable=durable) as connection:
            if not connection.execute(
                update(DeviceTable).where(DeviceTable.device_id == device_id).values(**values)
            ).rowcount:
                raise NotFoundError(f"no device {device_id!r}; `edgefl devices list` shows them")


def _get_device_row(connection: Connection, device_id: str) -> Row[Any]:
    row = _find_device_row(connection, device_id)
    if row is None:
        raise NotFoundError(f"no device {device_id!r}; `edgefl devices list` shows them")
    return row


def _verify_token(connection: Connection, token_id: str, secret_sha256: str) -> Row[Any]:
    token = connection.execute(select(TokenTable.__table__).where(TokenTable.token_id == token_id)).first()
    # Compared even if there is none, so that the time taken does not reveal which ids exist.
    stored_sha256 = token.secret_sha256 if token is not None else "0" * 64
    is_match = hmac.compare_digest(stored_sha256.encode(), secret_sha256.encode())
    if token is None or not is_match:
        raise TokenInvalidError("the coordinator knows no such token; make one with `edgefl coordinator token`")
    return token


def _check_token_usable(token: Row[Any], now: float) -> None:
    _check_token_lifetime(token, now)
    if token.uses_left < 1:
        raise TokenUsedError("the token has no uses left; make one with `edgefl coordinator token --uses N`")


def _check_token_lifetime(token: Row[Any], now: float) -> None:
    if now >= token.expires_at:
        raise TokenExpiredError(
            f"the token expired {now - token.expires_at:.0f} s ago; make one with `edgefl coordinator token`"
        )


def _find_user(connection: Connection, where: ColumnElement[bool]) -> UserRecord | None:
    row = connection.execute(_USER_QUERY.where(where)).first()
    return None if row is None else _to_user(row)


def _to_user(row: Row[Any]) -> UserRecord:
    return UserRecord(**row._mapping)  # noqa: SLF001 SQLAlchemy's public name for a row as a mapping


def find_key_holder(connection: Connection, public_key: bytes, device_id: str) -> str | None:
    """Returns another device of the fleet with this key, if there is one."""
    query = select(DeviceTable.device_id).where(
        DeviceTable.public_key == public_key, DeviceTable.removed_at.is_(None), DeviceTable.device_id != device_id
    )
    return connection.execute(query).scalar()


def _find_device_row(connection: Connection, device_id: str) -> Row[Any] | None:
    return connection.execute(select(DeviceTable.__table__).where(DeviceTable.device_id == device_id)).first()


def _to_stored_device(row: Row[Any]) -> StoredDevice:
    values: dict[str, Any] = dict(row._mapping)  # noqa: SLF001 SQLAlchemy's public name for a row as a mapping
    values["node_id"] = None if row.node_id is None else int(row.node_id)
    values["groups"] = tuple(row.groups)
    return StoredDevice(**values)


def _to_capabilities_record(row: Any) -> CapabilitiesRecord:
    return CapabilitiesRecord(device_id=row.device_id, at=row.at, facts=row.facts, shards=row.shards)


def _build_newest_capabilities_query(device_id: str | None = None) -> Any:
    """Returns a query for the newest row of every device, or of one device."""
    newest = select(func.max(CapabilitiesTable.id)).group_by(CapabilitiesTable.device_id)
    if device_id is not None:
        newest = newest.where(CapabilitiesTable.device_id == device_id)
    return select(CapabilitiesTable.__table__).where(CapabilitiesTable.id.in_(newest))
