"""Repository of rollouts: deployments of models, installations of releases and task packs.

Every write is durable, since no journal could rebuild it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from sqlalchemy import Select, func, insert, or_, select, update

from edgefl.core.errors import NotFoundError
from edgefl.storage.database import Database
from edgefl.storage.repositories.row_writing import insert_new, to_storable
from edgefl.storage.tables import (
    Base,
    DeploymentDeviceTable,
    DeploymentTable,
    InstallationDeviceTable,
    InstallationTable,
)


class RolloutStatus(StrEnum):
    """Status of a rollout. PREPARING: its file is being made; DONE: every device has answered."""

    PREPARING = "preparing"
    CANARY = "canary"
    ROLLING = "rolling"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"

    @property
    def is_final(self) -> bool:
        return self in {RolloutStatus.DONE, RolloutStatus.FAILED, RolloutStatus.SUPERSEDED}


class RolloutStage(StrEnum):
    """State of one device of a rollout.

    PENDING waits for the canaries, NOTIFIED is to fetch and check the artefact, RUNNING has switched to it. REJECTED
    found it worse than the one before, FAILED could not use it: both retained that one. ROLLED_BACK, of releases
    and packs alone, tried it and rolled back by itself. REVERTING, of models alone, is to return to the model before,
    and REVERTED has. SUPERSEDED got a newer rollout before it answered.
    """

    PENDING = "pending"
    NOTIFIED = "notified"
    RUNNING = "running"
    REJECTED = "rejected"
    FAILED = "failed"
    REVERTING = "reverting"
    REVERTED = "reverted"
    ROLLED_BACK = "rolled-back"
    SUPERSEDED = "superseded"


CANARY_PART, REMAINING_PART = "canary", "rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One rollout, whatever it brings to the devices.

    `KIND` names the kind of rollout; `ROLLS_BACK` is whether devices that run it roll back when it fails elsewhere.
    `sequence` is its place among all of its kind, given by the store.
    """

    KIND: ClassVar[str]
    ROLLS_BACK: ClassVar[bool]

    canary: int
    canary_s: float
    status: RolloutStatus
    created_at: float
    reason: str | None = None
    canary_until: float | None = None
    finished_at: float | None = None
    sequence: int = 0

    @property
    def id(self) -> str:
        return str(getattr(self, f"{self.KIND}_id"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRecord(RolloutRecord):
    """Deployment of a model; `devices` None means every device with a shard for the task, future ones too."""

    KIND: ClassVar[str] = "deployment"
    ROLLS_BACK: ClassVar[bool] = True

    deployment_id: str
    run_id: str | None
    model: str
    task: str
    options: Mapping[str, Any]
    devices: tuple[str, ...] | None
    tolerance: float
    min_accuracy: float
    test_fraction: float
    onnx_sha256: str | None = None
    bytes_file: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationRecord(RolloutRecord):
    """Installation of a release or task pack; `sha256` is that of its bundle, `key` the id of the signing key."""

    KIND: ClassVar[str] = "installation"
    ROLLS_BACK: ClassVar[bool] = False

    installation_id: str
    kind: str
    name: str
    version: str
    key: str
    sha256: str
    bytes_file: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDeviceRecord:
    """One device of a rollout; `part` is `canary` or `rest`."""

    KIND: ClassVar[str]

    device_id: str
    state: RolloutStage
    part: str = REMAINING_PART
    reason: str | None = None
    reported_at: float | None = None

    @property
    def rollout_id(self) -> str:
        return str(getattr(self, f"{self.KIND}_id"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentDeviceRecord(RolloutDeviceRecord):
    """One device of a deployment; accuracies, of the new model and of the one before, are on its own data."""

    KIND: ClassVar[str] = "deployment"

    deployment_id: str
    accuracy: float | None = None
    former_accuracy: float | None = None
    num_examples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationDeviceRecord(RolloutDeviceRecord):
    KIND: ClassVar[str] = "installation"

    installation_id: str


RecordT = TypeVar("RecordT", bound=RolloutRecord)

_OPEN_STATUSES = [str(status) for status in RolloutStatus if not status.is_final]
_SUPERSEDABLE_STAGES = [str(RolloutStage.PENDING), str(RolloutStage.NOTIFIED)]
_UNANSWERED_STAGES = [str(RolloutStage.NOTIFIED), str(RolloutStage.REVERTING)]


class RolloutRepository(Generic[RecordT]):
    """The rollouts of one kind in the store.

    Args:
        database: has the tables.
        table, record: of the rollouts.
        device_table, device_record: of their devices.
        replaces: column that the older rollouts that a new one supersedes have in common; None for all.
        list_command: lists the rollouts for a user.
    """

    def __init__(  # noqa: PLR0913 one argument per difference of the kinds
        self,
        database: Database,
        *,
        table: type[Base],
        record: type[RecordT],
        device_table: type[Base],
        device_record: type[RolloutDeviceRecord],
        replaces: str | None,
        list_command: str,
    ) -> None:
        self._database, self._record, self._device_record = database, record, device_record
        self._table: Any = table.__table__
        self._devices: Any = device_table.__table__
        self._device_class, self._replaces, self._list_command = device_table, replaces, list_command
        self.kind = record.KIND
        self._id_name = f"{record.KIND}_id"
        self._id, self._device_rollout_id = self._table.c[self._id_name], self._devices.c[self._id_name]

    def add(self, record: RecordT, device_ids: Sequence[str]) -> None:
        """Adds a rollout with all devices pending; unanswered ones of those that it replaces are superseded."""
        replaced = select(self._id)
        if self._replaces is not None:
            replaced = replaced.where(self._table.c[self._replaces] == getattr(record, self._replaces))
        supersession = (
            update(self._devices)
            .where(
                self._devices.c.device_id.in_(device_ids),
                self._devices.c.state.in_(_SUPERSEDABLE_STAGES),
                self._device_rollout_id.in_(replaced),
            )
            .values(state=str(RolloutStage.SUPERSEDED))
        )
        with self._database.batch(durable=True), self._database.write() as connection:
            connection.execute(supersession)
            next_sequence = select(func.coalesce(func.max(self._table.c.sequence), 0) + 1).scalar_subquery()
            connection.execute(insert(self._table).values(**{**_to_columns(record), "sequence": next_sequence}))
            self.add_devices(record.id, device_ids, RolloutStage.PENDING)

    def add_devices(self, rollout_id: str, device_ids: Sequence[str], state: RolloutStage) -> None:
        """Adds devices to a rollout; those that it has already stay unchanged."""
        make: Any = self._device_record
        records = [make(**{self._id_name: rollout_id}, device_id=name, state=state) for name in device_ids]
        rows = [_to_columns(record) for record in records]
        with self._database.write(durable=True) as connection:
            insert_new(connection, self._device_class, rows, (self._id_name, "device_id"))

    def get(self, rollout_id: str) -> RecordT:
        """Returns one rollout by its id or a prefix of it.

        Raises:
            NotFoundError: none or several match.
        """
        exact = self._read(select(self._table).where(self._id == rollout_id))
        by_prefix = select(self._table).where(self._id.startswith(rollout_id, autoescape=True)).limit(2)
        records = exact or self._read(by_prefix)
        if len(records) > 1:
            raise NotFoundError(f"several {self.kind}s begin with {rollout_id!r}; say more of it")
        if not records:
            raise NotFoundError(f"no {self.kind} {rollout_id!r}; {self._list_command}")
        return records[0]

    def list_newest(self, *, limit: int | None = None) -> list[RecordT]:
        """Returns the rollouts, newest first."""
        query = select(self._table).order_by(self._table.c.sequence.desc())
        return self._read(query.limit(limit))

    def list_open(self) -> list[RecordT]:
        """Returns those that are not final, or with a device that has work left; oldest first."""
        waiting = select(self._device_rollout_id).where(self._devices.c.state.in_(_UNANSWERED_STAGES))
        is_open = or_(self._table.c.status.in_(_OPEN_STATUSES), self._id.in_(waiting))
        return self._read(select(self._table).where(is_open).order_by(self._table.c.sequence))

    def update(self, rollout_id: str, **values: Any) -> None:
        """Updates columns of a rollout."""
        statement = update(self._table).where(self._id == rollout_id).values(**to_storable(values))
        with self._database.write(durable=True) as connection:
            connection.execute(statement)

    def list_devices(self, rollout_id: str) -> list[RolloutDeviceRecord]:
        """Returns the devices of a rollout by name."""
        query = select(self._devices).where(self._device_rollout_id == rollout_id)
        return self._read_devices(query.order_by(self._devices.c.device_id))

    def list_of_device(self, device_id: str) -> list[RolloutDeviceRecord]:
        """Returns one device's rows of every rollout, newest first."""
        query = select(self._devices).join(self._table, self._id == self._device_rollout_id)
        query = query.where(self._devices.c.device_id == device_id)
        return self._read_devices(query.order_by(self._table.c.sequence.desc()))

    def count_devices(self) -> dict[str, dict[str, int]]:
        """Returns the number of devices by rollout and state."""
        columns = self._device_rollout_id, self._devices.c.state
        counts: dict[str, dict[str, int]] = {}
        with self._database.read() as connection:
            for rollout_id, state, number in connection.execute(select(*columns, func.count()).group_by(*columns)):
                counts.setdefault(rollout_id, {})[state] = number
        return counts

    def update_devices(self, rollout_id: str, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Updates columns of a rollout's devices, by device, in one transaction."""
        with self._database.write(durable=True) as connection:
            for device_id, values in changes.items():
                statement = update(self._devices).where(
                    self._device_rollout_id == rollout_id, self._devices.c.device_id == device_id
                )
                connection.execute(statement.values(**to_storable(values)))

    def get_running(self) -> dict[str, RecordT]:
        """Returns, by device, the newest rollout that it has switched to."""
        query = select(self._devices.c.device_id, self._table).join(self._table, self._id == self._device_rollout_id)
        query = query.where(self._devices.c.state == str(RolloutStage.RUNNING)).order_by(self._table.c.sequence)
        with self._database.read() as connection:
            return {str(row["device_id"]): self._parse(row) for row in connection.execute(query).mappings()}

    def _read(self, query: Select[Any]) -> list[RecordT]:
        with self._database.read() as connection:
            return [self._parse(row) for row in connection.execute(query).mappings()]

    def _read_devices(self, query: Select[Any]) -> list[RolloutDeviceRecord]:
        with self._database.read() as connection:
            rows = [_select_fields(self._device_record, row) for row in connection.execute(query).mappings()]
        return [self._device_record(**{**row, "state": RolloutStage(row["state"])}) for row in rows]

    def _parse(self, row: Mapping[Any, Any]) -> RecordT:
        values = {**_select_fields(self._record, row), "status": RolloutStatus(row["status"])}
        if values.get("devices") is not None:
            values["devices"] = tuple(values["devices"])
        return self._record(**values)


def create_deployment_repository(
    database: Database,
) -> RolloutRepository[DeploymentRecord]:
    return RolloutRepository(
        database,
        table=DeploymentTable,
        record=DeploymentRecord,
        device_table=DeploymentDeviceTable,
        device_record=DeploymentDeviceRecord,
        replaces=None,
        list_command="`edgefl model deployments`",
    )


def create_installation_repository(
    database: Database,
) -> RolloutRepository[InstallationRecord]:
    return RolloutRepository(
        database,
        table=InstallationTable,
        record=InstallationRecord,
        device_table=InstallationDeviceTable,
        device_record=InstallationDeviceRecord,
        replaces="name",
        list_command="`edgefl devices updates` lists them",
    )


def _to_columns(record: Any) -> dict[str, Any]:
    return {item.name: to_storable(getattr(record, item.name)) for item in fields(record)}


def _select_fields(record: Any, row: Mapping[Any, Any]) -> dict[str, Any]:
    return {item.name: row[item.name] for item in fields(record)}
