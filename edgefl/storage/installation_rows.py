"""Installations in the store; all of it is durable, since no journal could rebuild it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, Select, func, insert, or_, select, update

from edgefl.errors import NotFoundError
from edgefl.storage.database import Database
from edgefl.storage.deployment_records import DeploymentStatus, DeviceStage
from edgefl.storage.installation_records import InstallationDeviceRecord, InstallationRecord
from edgefl.storage.models import Installation, InstallationDevice
from edgefl.storage.plain import columns_of, storable

_OPEN = (DeploymentStatus.CANARY, DeploymentStatus.ROLLING)
_UNTOLD = (DeviceStage.HELD, DeviceStage.TOLD)


class InstallationRows:
    """The store's part about installations."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_installation(self, record: InstallationRecord, device_ids: Sequence[str]) -> None:
        """Keeps a new installation whose devices are all held; an older one of the same bundle's name gives way."""
        same = select(Installation.installation_id).where(Installation.name == record.name)
        older = (
            update(InstallationDevice)
            .where(
                InstallationDevice.device_id.in_(device_ids),
                InstallationDevice.state.in_(map(str, _UNTOLD)),
                InstallationDevice.installation_id.in_(same),
            )
            .values(state=str(DeviceStage.SUPERSEDED))
        )
        rows = [
            columns_of(
                InstallationDeviceRecord(
                    installation_id=record.installation_id, device_id=device_id, state=DeviceStage.HELD
                )
            )
            for device_id in device_ids
        ]
        with self._database.write(durable=True) as connection:
            connection.execute(older)
            connection.execute(insert(Installation), columns_of(record))
            connection.execute(insert(InstallationDevice), rows)

    def installation(self, installation_id: str) -> InstallationRecord:
        """Returns one installation by its id.

        Raises:
            NotFoundError: there is none.
        """
        found = self._installations(
            select(Installation.__table__).where(Installation.installation_id == installation_id)
        )
        if not found:
            raise NotFoundError(f"no installation {installation_id!r}; `edgefl devices updates` lists them")
        return found[0]

    def installations(self, *, limit: int | None = None) -> list[InstallationRecord]:
        """Returns the installations, newest first."""
        query = select(Installation.__table__).order_by(
            Installation.created_at.desc(), Installation.installation_id.desc()
        )
        return self._installations(query.limit(limit))

    def open_installations(self) -> list[InstallationRecord]:
        """Returns those that are not final, or of which a device was told and has not answered; oldest first."""
        told = select(InstallationDevice.installation_id).where(InstallationDevice.state == str(DeviceStage.TOLD))
        query = (
            select(Installation.__table__)
            .where(or_(Installation.status.in_(map(str, _OPEN)), Installation.installation_id.in_(told)))
            .order_by(Installation.created_at)
        )
        return self._installations(query)

    def set_installation(self, installation_id: str, **values: Any) -> None:
        """Changes columns of an installation."""
        changed = update(Installation).where(Installation.installation_id == installation_id)
        with self._database.write(durable=True) as connection:
            connection.execute(changed.values(**storable(values)))

    def installation_devices(self, installation_id: str) -> list[InstallationDeviceRecord]:
        """Returns the devices of an installation by name."""
        query = select(InstallationDevice.__table__).where(InstallationDevice.installation_id == installation_id)
        return self._devices(query.order_by(InstallationDevice.device_id))

    def device_installations(self, device_id: str) -> list[InstallationDeviceRecord]:
        """Returns what one device has of every installation, newest first."""
        query = (
            select(InstallationDevice.__table__)
            .join(Installation, Installation.installation_id == InstallationDevice.installation_id)
            .where(InstallationDevice.device_id == device_id)
            .order_by(Installation.created_at.desc(), Installation.installation_id.desc())
        )
        return self._devices(query)

    def installation_counts(self) -> dict[str, dict[str, int]]:
        """Returns how many devices are in which state, by installation."""
        query = select(InstallationDevice.installation_id, InstallationDevice.state, func.count()).group_by(
            InstallationDevice.installation_id, InstallationDevice.state
        )
        counts: dict[str, dict[str, int]] = {}
        with self._database.read() as connection:
            for installation_id, state, number in connection.execute(query):
                counts.setdefault(installation_id, {})[state] = number
        return counts

    def set_installation_devices(self, installation_id: str, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Changes columns of an installation's devices, by device, in one transaction."""
        with self._database.write(durable=True) as connection:
            for device_id, values in changes.items():
                changed = update(InstallationDevice).where(
                    InstallationDevice.installation_id == installation_id,
                    InstallationDevice.device_id == device_id,
                )
                connection.execute(changed.values(**storable(values)))

    def _installations(self, query: Select[Any]) -> list[InstallationRecord]:
        with self._database.read() as connection:
            return [_record(row) for row in connection.execute(query)]

    def _devices(self, query: Select[Any]) -> list[InstallationDeviceRecord]:
        with self._database.read() as connection:
            return [_device(row) for row in connection.execute(query)]


def _record(row: Row[Any]) -> InstallationRecord:
    values: dict[str, Any] = dict(row._mapping)  # noqa: SLF001 SQLAlchemy's public name for a row as a mapping
    return InstallationRecord(**{**values, "status": DeploymentStatus(values["status"])})


def _device(row: Row[Any]) -> InstallationDeviceRecord:
    values: dict[str, Any] = dict(row._mapping)  # noqa: SLF001 as above
    values.pop("id")
    return InstallationDeviceRecord(**{**values, "state": DeviceStage(values["state"])})
