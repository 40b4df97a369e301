"""Repository of installations; every write is durable, since no journal could rebuild it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, Select, func, insert, or_, select, update

from edgefl.core.errors import NotFoundError
from edgefl.storage.database import Database
from edgefl.storage.repositories.deployment_records import RolloutStage, RolloutStatus
from edgefl.storage.repositories.installation_records import InstallationDeviceRecord, InstallationRecord
from edgefl.storage.repositories.sanitise import to_columns, to_storable
from edgefl.storage.tables import InstallationDeviceTable, InstallationTable

_OPEN_STATUSES = (RolloutStatus.CANARY, RolloutStatus.ROLLING)
_SUPERSEDABLE_STAGES = (RolloutStage.PENDING, RolloutStage.NOTIFIED)


class InstallationRepository:
    """The store's methods on installations."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_installation(self, record: InstallationRecord, device_ids: Sequence[str]) -> None:
        """Adds an installation with all devices pending; older ones of the same bundle name are superseded."""
        same_name = select(InstallationTable.installation_id).where(InstallationTable.name == record.name)
        supersession = (
            update(InstallationDeviceTable)
            .where(
                InstallationDeviceTable.device_id.in_(device_ids),
                InstallationDeviceTable.state.in_(map(str, _SUPERSEDABLE_STAGES)),
                InstallationDeviceTable.installation_id.in_(same_name),
            )
            .values(state=str(RolloutStage.SUPERSEDED))
        )
        rows = [
            to_columns(
                InstallationDeviceRecord(
                    installation_id=record.installation_id, device_id=device_id, state=RolloutStage.PENDING
                )
            )
            for device_id in device_ids
        ]
        with self._database.write(durable=True) as connection:
            connection.execute(supersession)
            connection.execute(insert(InstallationTable), to_columns(record))
            connection.execute(insert(InstallationDeviceTable), rows)

    def get_installation(self, installation_id: str) -> InstallationRecord:
        """Returns one installation by its id.

        Raises:
            NotFoundError: there is none.
        """
        installations = self._read_installations(
            select(InstallationTable.__table__).where(InstallationTable.installation_id == installation_id)
        )
        if not installations:
            raise NotFoundError(f"no installation {installation_id!r}; `edgefl devices updates` lists them")
        return installations[0]

    def list_installations(self, *, limit: int | None = None) -> list[InstallationRecord]:
        """Returns the installations, newest first."""
        query = select(InstallationTable.__table__).order_by(
            InstallationTable.created_at.desc(), InstallationTable.installation_id.desc()
        )
        return self._read_installations(query.limit(limit))

    def list_open_installations(self) -> list[InstallationRecord]:
        """Returns those that are not final, or with a notified device that has not answered; oldest first."""
        notified_query = select(InstallationDeviceTable.installation_id).where(
            InstallationDeviceTable.state == str(RolloutStage.NOTIFIED)
        )
        query = (
            select(InstallationTable.__table__)
            .where(
                or_(
                    InstallationTable.status.in_(map(str, _OPEN_STATUSES)),
                    InstallationTable.installation_id.in_(notified_query),
                )
            )
            .order_by(InstallationTable.created_at)
        )
        return self._read_installations(query)

    def update_installation(self, installation_id: str, **values: Any) -> None:
        """Updates columns of an installation."""
        statement = update(InstallationTable).where(InstallationTable.installation_id == installation_id)
        with self._database.write(durable=True) as connection:
            connection.execute(statement.values(**to_storable(values)))

    def list_installation_devices(self, installation_id: str) -> list[InstallationDeviceRecord]:
        """Returns the devices of an installation by name."""
        query = select(InstallationDeviceTable.__table__).where(
            InstallationDeviceTable.installation_id == installation_id
        )
        return self._read_installation_devices(query.order_by(InstallationDeviceTable.device_id))

    def list_device_installations(self, device_id: str) -> list[InstallationDeviceRecord]:
        """Returns one device's rows of every installation, newest first."""
        query = (
            select(InstallationDeviceTable.__table__)
            .join(InstallationTable, InstallationTable.installation_id == InstallationDeviceTable.installation_id)
            .where(InstallationDeviceTable.device_id == device_id)
            .order_by(InstallationTable.created_at.desc(), InstallationTable.installation_id.desc())
        )
        return self._read_installation_devices(query)

    def count_installation_devices(self) -> dict[str, dict[str, int]]:
        """Returns the number of devices by installation and state."""
        query = select(InstallationDeviceTable.installation_id, InstallationDeviceTable.state, func.count()).group_by(
            InstallationDeviceTable.installation_id, InstallationDeviceTable.state
        )
        counts: dict[str, dict[str, int]] = {}
        with self._database.read() as connection:
            for installation_id, state, number in connection.execute(query):
                counts.setdefault(installation_id, {})[state] = number
        return counts

    def update_installation_devices(self, installation_id: str, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Updates columns of an installation's devices, by device, in one transaction."""
        with self._database.write(durable=True) as connection:
            for device_id, values in changes.items():
                statement = update(InstallationDeviceTable).where(
                    InstallationDeviceTable.installation_id == installation_id,
                    InstallationDeviceTable.device_id == device_id,
                )
                connection.execute(statement.values(**to_storable(values)))

    def _read_installations(self, query: Select[Any]) -> list[InstallationRecord]:
        with self._database.read() as connection:
            return [_to_record(row) for row in connection.execute(query)]

    def _read_installation_devices(self, query: Select[Any]) -> list[InstallationDeviceRecord]:
        with self._database.read() as connection:
            return [_to_device_record(row) for row in connection.execute(query)]


def _to_record(row: Row[Any]) -> InstallationRecord:
    values: dict[str, Any] = dict(row._mapping)  # noqa: SLF001 SQLAlchemy's public name for a row as a mapping
    return InstallationRecord(**{**values, "status": RolloutStatus(values["status"])})


def _to_device_record(row: Row[Any]) -> InstallationDeviceRecord:
    values: dict[str, Any] = dict(row._mapping)  # noqa: SLF001 as above
    values.pop("id")
    return InstallationDeviceRecord(**{**values, "state": RolloutStage(values["state"])})
