"""Which certificates were issued, in the events: what is renewed when, and which ones count no more."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, insert, select, update

from edgefl.errors import NameTakenError, NotFoundError
from edgefl.storage.models import Device, Event
from edgefl.storage.store import Store

ISSUED = "certificate-issued"
READMITTED = "certificate-readmitted"
"""One that a coordinator issued of whose store this one is a backup: nobody has renewed it here."""
ROTATION_ASKED = "rotation-asked"
REMOVED = "device-removed"


def note_issued(
    store: Store, *, serial: str, ends_at: float, at: float, device_id: str | None = None, former: str | None = None
) -> None:
    """Remembers a certificate by its serial (hexadecimal); `former` is the one in whose place it is."""
    with store.batch(durable=True):
        store.record_event(ISSUED, _message(ends_at), at=at, device_id=device_id, data=_data(serial, ends_at, former))


def renew_certificate(  # noqa: PLR0913 one keyword per fact
    store: Store,
    device_id: str,
    *,
    public_key: bytes,
    serial: str,
    ends_at: float,
    at: float,
    kind: str = ISSUED,
) -> None:
    """Gives a device of the fleet another certificate, which may be for another key, in one durable transaction.

    `kind` is that of the event, ISSUED or READMITTED.

    Raises:
        NotFoundError: the fleet has no such device.
        NameTakenError: another device has this key.
    """
    with store.database.write(durable=True) as connection:
        known = connection.execute(
            select(Device.certificate_serial).where(Device.device_id == device_id, Device.removed_at.is_(None))
        ).first()
        if known is None:
            raise NotFoundError(f"no device {device_id!r} in the fleet")
        holder = select(Device.device_id).where(
            Device.public_key == public_key, Device.removed_at.is_(None), Device.device_id != device_id
        )
        if connection.execute(holder).first() is not None:
            raise NameTakenError("another device has this key; make a new one")
        changed = {"public_key": public_key, "certificate_serial": serial}
        connection.execute(update(Device).where(Device.device_id == device_id).values(**changed))
        row = {
            "at": at, "kind": kind, "message": _message(ends_at), "run_id": None, "device_id": device_id,
            "data": _data(serial, ends_at, known.certificate_serial),
        }  # fmt: skip
        connection.execute(insert(Event), row)


def serials(store: Store) -> dict[str, str | None]:
    """Returns the serial of the certificate that each device of the fleet has now."""
    with store.database.read() as connection:
        rows = connection.execute(
            select(Device.device_id, Device.certificate_serial).where(Device.removed_at.is_(None))
        )
        return {str(row[0]): row[1] for row in rows}


def revoked_serials(store: Store, *, now: float, own: str | None = None) -> frozenset[str]:
    """Returns the serials that count no more and have not ended by themselves; `own` is the coordinator's own."""
    with store.database.read() as connection:
        told: list[dict[str, Any]] = list(
            connection.execute(select(Event.data).where(Event.kind.in_((ISSUED, READMITTED)))).scalars()
        )
        removed = connection.execute(
            select(Device.certificate_serial).where(Device.removed_at.is_not(None))
        ).scalars()
        revoked = {serial for serial in removed if serial}
    ends = {data["serial"]: data["ends_at"] for data in told}
    revoked |= {serial for serial, ends_at in ends.items() if ends_at > now}
    # Of those that were issued before this was kept nobody knows the end.
    revoked |= {data["former"] for data in told if data.get("former") and data["former"] not in ends}
    return frozenset(revoked - set(serials(store).values()) - {own})


def is_heard_of(store: Store, device_id: str, *, serial: str, ends_at: float) -> bool:
    """Returns whether a certificate was ever issued as far as this store knows, or ends before the device's own.

    Of a name that was taken out once and given anew nobody can say whose a certificate is: it counts as heard of.
    """
    with store.database.read() as connection:
        told: list[dict[str, Any]] = list(
            connection.execute(select(Event.data).where(Event.kind.in_((ISSUED, READMITTED)))).scalars()
        )
        taken_out = select(Event.id).where(Event.kind == REMOVED, Event.device_id == device_id).limit(1)
        if connection.execute(taken_out).first() is not None:
            return True
        held = {row[0]: row[1] for row in connection.execute(select(Device.device_id, Device.certificate_serial))}
    heard = {data["serial"] for data in told} | {data.get("former") for data in told} | set(held.values())
    own_ends_at = max((data["ends_at"] for data in told if data["serial"] == held.get(device_id)), default=0.0)
    return serial in heard or ends_at < own_ends_at


def due_for_rotation(store: Store) -> frozenset[str]:
    """Returns the devices that have got no certificate since all were asked to renew theirs."""
    newest = select(func.max(Event.id)).where(Event.kind == ROTATION_ASKED)
    issued = select(Event.device_id).where(Event.kind == ISSUED, Event.id > newest.scalar_subquery())
    with store.database.read() as connection:
        if connection.execute(newest).scalar() is None:
            return frozenset()
        renewed = set(connection.execute(issued).scalars())
    return frozenset(serials(store)) - renewed


def _data(serial: str, ends_at: float, former: str | None) -> dict[str, Any]:
    return {"serial": serial, "ends_at": ends_at, **({"former": former} if former else {})}


def _message(ends_at: float) -> str:
    return f"good until {datetime.fromtimestamp(ends_at, tz=UTC):%Y-%m-%d}"
