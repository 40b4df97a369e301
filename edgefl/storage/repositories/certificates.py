"""Issued certificates, recorded as events: renewals and revocations."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, insert, select, update

from edgefl.core.errors import NameTakenError, NotFoundError
from edgefl.storage.store import Store
from edgefl.storage.tables import DeviceTable, EventTable

CERTIFICATE_ISSUED = "certificate-issued"
CERTIFICATE_READMITTED = "certificate-readmitted"
"""Event of a certificate issued by the coordinator whose backup this store is; it was not renewed here."""
ROTATION_REQUESTED = "rotation-asked"
DEVICE_REMOVED = "device-removed"


def record_issued_certificate(
    store: Store,
    *,
    serial: str,
    expires_at: float,
    at: float,
    device_id: str | None = None,
    previous_serial: str | None = None,
) -> None:
    """Records a certificate by its serial (hexadecimal); `previous_serial` is the one that it replaces."""
    with store.batch(durable=True):
        store.record_event(
            CERTIFICATE_ISSUED,
            _format_event_message(expires_at),
            at=at,
            device_id=device_id,
            data=_make_event_data(serial, expires_at, previous_serial),
        )


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

    `kind` is that of the event, ISSUED or READMITTED.

    Raises:
        NotFoundError: the fleet has no such device.
        NameTakenError: another device has this key.
    """
    with store.database.write(durable=True) as connection:
        device_row = connection.execute(
            select(DeviceTable.certificate_serial).where(
                DeviceTable.device_id == device_id, DeviceTable.removed_at.is_(None)
            )
        ).first()
        if device_row is None:
            raise NotFoundError(f"no device {device_id!r} in the fleet")
        holder = select(DeviceTable.device_id).where(
            DeviceTable.public_key == public_key, DeviceTable.removed_at.is_(None), DeviceTable.device_id != device_id
        )
        if connection.execute(holder).first() is not None:
            raise NameTakenError("another device has this key; make a new one")
        values = {"public_key": public_key, "certificate_serial": serial}
        connection.execute(update(DeviceTable).where(DeviceTable.device_id == device_id).values(**values))
        row = {
            "at": at, "kind": kind, "message": _format_event_message(expires_at), "run_id": None,
            "device_id": device_id, "data": _make_event_data(serial, expires_at, device_row.certificate_serial),
        }  # fmt: skip
        connection.execute(insert(EventTable), row)


def get_certificate_serials(store: Store) -> dict[str, str | None]:
    """Returns the current certificate serial of each device of the fleet."""
    with store.database.read() as connection:
        rows = connection.execute(
            select(DeviceTable.device_id, DeviceTable.certificate_serial).where(DeviceTable.removed_at.is_(None))
        )
        return {str(row[0]): row[1] for row in rows}


def list_revoked_serials(store: Store, *, now: float, own_serial: str | None = None) -> frozenset[str]:
    """Returns revoked serials that have not expired by themselves; `own_serial` is the coordinator's own."""
    with store.database.read() as connection:
        issue_events: list[dict[str, Any]] = list(
            connection.execute(
                select(EventTable.data).where(EventTable.kind.in_((CERTIFICATE_ISSUED, CERTIFICATE_READMITTED)))
            ).scalars()
        )
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
        issue_events: list[dict[str, Any]] = list(
            connection.execute(
                select(EventTable.data).where(EventTable.kind.in_((CERTIFICATE_ISSUED, CERTIFICATE_READMITTED)))
            ).scalars()
        )
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
    """Returns the devices without a new certificate since a rotation was requested."""
    newest = select(func.max(EventTable.id)).where(EventTable.kind == ROTATION_REQUESTED)
    issued_query = select(EventTable.device_id).where(
        EventTable.kind == CERTIFICATE_ISSUED, EventTable.id > newest.scalar_subquery()
    )
    with store.database.read() as connection:
        if connection.execute(newest).scalar() is None:
            return frozenset()
        renewed_ids = set(connection.execute(issued_query).scalars())
    return frozenset(get_certificate_serials(store)) - renewed_ids


def _make_event_data(serial: str, expires_at: float, previous_serial: str | None) -> dict[str, Any]:
    return {"serial": serial, "ends_at": expires_at, **({"former": previous_serial} if previous_serial else {})}


def _format_event_message(expires_at: float) -> str:
    return f"good until {datetime.fromtimestamp(expires_at, tz=UTC):%Y-%m-%d}"
