"""Issued certificates, recorded as events: renewals and revocations."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, func, select, update

from edgefl.core.errors import NameTakenError, NotFoundError
from edgefl.core.types import SUPERNODE
from edgefl.storage.repositories.fleet import find_key_holder
from edgefl.storage.store import Store
from edgefl.storage.tables import DeviceTable, EventTable

CERTIFICATE_ISSUED = "certificate-issued"
CERTIFICATE_REENROLLED = "certificate-re-enrolled"
"""Event of a certificate issued by the coordinator whose backup this store is; it was not renewed here."""
ROTATION_REQUESTED = "rotation-requested"
DEVICE_REMOVED = "device-removed"


def record_issued_certificate(  # noqa: PLR0913 one keyword per fact
    store: Store,
    *,
    serial: str,
    expires_at: float,
    at: float,
    device_id: str | None = None,
    previous_serial: str | None = None,
    kind: str = CERTIFICATE_ISSUED,
) -> None:
    """Records a certificate by its serial (hexadecimal); `previous_serial` is the one that it replaces."""
    former = {"former": previous_serial} if previous_serial else {}
    message = f"good until {datetime.fromtimestamp(expires_at, tz=UTC):%Y-%m-%d}"
    data = {"serial": serial, "ends_at": expires_at, **former}
    with store.batch(durable=True):
        store.record_event(kind, message, at=at, device_id=device_id, data=data)


def renew_certificate(  # noqa: PLR0913 one keyword per fact
    store: Store,
    device_id: str,
    *,
    public_key: bytes,
    serial: str,
    expires_at: float,
    at: float,
    kind: str = CERTIFICATE_ISSUED,
) -> None:
    """Replaces a device's certificate, possibly for another key, in one durable transaction.

    `kind` is that of the event, ISSUED or REENROLLED.

    Raises:
        NotFoundError: the fleet has no such device, or it is a stock SuperNode, which has no certificate.
        NameTakenError: another device has this key.
    """
    with store.batch(durable=True), store.database.write() as connection:
        row = connection.execute(
            select(DeviceTable.certificate_serial).where(
                DeviceTable.device_id == device_id, DeviceTable.removed_at.is_(None), DeviceTable.role != SUPERNODE
            )
        ).first()
        if row is None:
            raise NotFoundError(f"no device {device_id!r} in the fleet")
        if find_key_holder(connection, public_key, device_id) is not None:
            raise NameTakenError("another device has this key; make a new one")
        values = {"public_key": public_key, "certificate_serial": serial}
        connection.execute(update(DeviceTable).where(DeviceTable.device_id == device_id).values(**values))
        record_issued_certificate(
            store, serial=serial, expires_at=expires_at, at=at, device_id=device_id,
            previous_serial=row.certificate_serial, kind=kind,
        )  # fmt: skip


def get_certificate_serials(store: Store) -> dict[str, str | None]:
    """Returns the current certificate serial of each device of the fleet."""
    query = select(DeviceTable.device_id, DeviceTable.certificate_serial).where(DeviceTable.removed_at.is_(None))
    return {row.device_id: row.certificate_serial for row in store.database.read_rows(query)}


def list_revoked_serials(store: Store, *, now: float, own_serial: str | None = None) -> frozenset[str]:
    """Returns revoked serials that have not expired by themselves; `own_serial` is the coordinator's own."""
    with store.database.read() as connection:
        issue_events = _read_issue_events(connection)
        removed_serials = connection.execute(
            select(DeviceTable.certificate_serial).where(DeviceTable.removed_at.is_not(None))
        ).scalars()
        revoked = {serial for serial in removed_serials if serial}
    ends = {data["serial"]: data["ends_at"] for data in issue_events}
    revoked |= {serial for serial, ends_at in ends.items() if ends_at > now}
    # The expiry of certificates issued before it was recorded is unknown.
    revoked |= {data["former"] for data in issue_events if data.get("former") and data["former"] not in ends}
    return frozenset(revoked - set(get_certificate_serials(store).values()) - {own_serial})


def is_known_certificate(store: Store, device_id: str, *, serial: str, expires_at: float) -> bool:
    """Returns whether a certificate was ever issued by this store's records, or ends before the device's own.

    Certificates of a name that was removed and reused cannot be attributed: they count as known.
    """
    with store.database.read() as connection:
        issue_events = _read_issue_events(connection)
        removal_query = (
            select(EventTable.id).where(EventTable.kind == DEVICE_REMOVED, EventTable.device_id == device_id).limit(1)
        )
        if connection.execute(removal_query).first() is not None:
            return True
        current_serials = {
            row[0]: row[1]
            for row in connection.execute(select(DeviceTable.device_id, DeviceTable.certificate_serial))
        }
    known_serials = (
        {data["serial"] for data in issue_events}
        | {data.get("former") for data in issue_events}
        | set(current_serials.values())
    )
    own_ends_at = max(
        (data["ends_at"] for data in issue_events if data["serial"] == current_serials.get(device_id)), default=0.0
    )
    return serial in known_serials or expires_at < own_ends_at


def list_devices_due_for_rotation(store: Store) -> frozenset[str]:
    """Returns the devices without a new certificate since a rotation was requested; stock SuperNodes have none."""
    newest = select(func.max(EventTable.id)).where(EventTable.kind == ROTATION_REQUESTED)
    issued_query = select(EventTable.device_id).where(
        EventTable.kind == CERTIFICATE_ISSUED, EventTable.id > newest.scalar_subquery()
    )
    member_query = select(DeviceTable.device_id).where(
        DeviceTable.removed_at.is_(None), DeviceTable.role != SUPERNODE
    )
    with store.database.read() as connection:
        if connection.execute(newest).scalar() is None:
            return frozenset()
        renewed_ids = set(connection.execute(issued_query).scalars())
        return frozenset(connection.execute(member_query).scalars()) - renewed_ids


def _read_issue_events(connection: Connection) -> list[dict[str, Any]]:
    query = select(EventTable.data).where(EventTable.kind.in_((CERTIFICATE_ISSUED, CERTIFICATE_REENROLLED)))
    return list(connection.execute(query).scalars())
