"""Deployments of a coordinator: what is told to whom and when, with a real store and boards that only speak."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from small_fleet import SmallFleet, eventually, settled
from wheel_files import Signer

from edgefl.coordinator.directory import CoordinatorDirectory, init_directory
from edgefl.coordinator.rollouts import service
from edgefl.coordinator.rollouts.deployments import (
    DeploymentRequest,
    Deployments,
    DeploymentService,
    make_deployment_file,
    plan_deployments,
    prune_deployment_files,
)
from edgefl.coordinator.rollouts.installations import BundleStore
from edgefl.core.config import ConfigError, RunConfig, parse_run
from edgefl.core.errors import (
    DataError,
    EdgeflError,
    NotFoundError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    TaskError,
    UsageError,
)
from edgefl.core.protocol import EVALUATOR_NAME, Capabilities, Command, Heartbeat, StatusMessage
from edgefl.storage.checkpoints import load_model_file, save_model
from edgefl.storage.queries.dashboard import list_events_after
from edgefl.storage.repositories.records import SavedModelRow, UpdateRow
from edgefl.storage.repositories.rollouts import DeploymentRecord, RolloutStatus
from edgefl.storage.store import Store
from edgefl.system.bundles.archive import SignedManifest

MODEL = "ab" * 32


class Fleet:
    """A store with one finished run, a registry, and boards that hear commands and say what a test makes them say."""

    def __init__(self, root: Path) -> None:
        self.directory: CoordinatorDirectory = init_directory(root, hosts=["127.0.0.1"], fleet="lab", port=1)
        self.store = Store.open(self.directory.database)
        self.registry = SmallFleet(clock=time.monotonic).registry
        self.bundles = BundleStore(root / "bundles")
        self.commands: list[tuple[str, str, str | None]] = []
        self.ids: list[str] = []
        self.exported: list[tuple[str, Mapping[str, Any], Path]] = []
        self.export_fails: Exception | None = None
        self.fatal: list[EdgeflError] = []
        self.running: list[DeploymentService] = []
        self._seq = 0
        config = parse_run({"run": {"task": "digits", "local_test_fraction": 0.3}, "task": {"model": "logistic"}})
        self.store.add_run(
            run_id="r1", name="first", task="digits", strategy="fedavg", config=config.to_json(), seed=7,
            submitted_at=1.0,
        )  # fmt: skip
        row = SavedModelRow(version=1, round=1, last_record=1, sha256=MODEL, bytes_file=1, at=1.0, accuracy=0.5)
        self.store.record_saved_model("r1", row)

    def add(self, name: str, *, tasks: tuple[str, ...] = ("digits",), is_online: bool = True) -> None:
        self.registry.add(name, node_id=hash(name), role="trainer", groups=(), examples=dict.fromkeys(tasks, 5))
        if is_online:
            self.online(name)

    def online(self, name: str) -> None:
        self.registry.record_status(name, StatusMessage(state="online", boot_id=f"boot of {name}", session_no=1))
        self.say(name)

    def start(self) -> DeploymentService:
        made = DeploymentService(
            Deployments(
                store=self.store,
                registry=self.registry,
                directory=self.directory,
                export=self.export,
                bundle_store=self.bundles,
            ),
            store=self.store,
            registry=self.registry,
            send_command=self.send_command,
            on_fatal=self.fatal.append,
        )
        self.running.append(made)
        made.start()
        return made

    def send_command(self, device_id: str, command: Command) -> None:
        self.commands.append((device_id, command.kind, command.argument))
        self.ids.append(command.id)

    def export(self, task: str, options: Mapping[str, Any], model: Path, out: Path) -> None:
        if self.export_fails:
            raise self.export_fails
        self.exported.append((task, options, model))
        out.write_bytes(b"a model")

    def say(
        self, name: str, state: str | None = None, deployment: str = "", runs: str | None = None, **more: Any
    ) -> None:
        """One heartbeat, with what the board says of its last deployment."""
        self._seq += 1
        told = {"id": deployment, "state": state, "runs": runs, **more} if state else None
        heartbeat = Heartbeat(seq=self._seq, session_no=1, uptime_s=1.0, deployment=told)
        self.registry.record_heartbeat(name, heartbeat)
        for deployments in self.running:
            deployments.on_heartbeat(name, heartbeat)

    def stages(self, deployment: str) -> dict[str, str]:
        return {row.device_id: str(row.state) for row in self.store.deployments.list_devices(deployment)}

    def heard(self, name: str, kind: str = "deploy") -> int:
        return sum(command[:2] == (name, kind) for command in self.commands)

    def close(self) -> None:
        for deployments in self.running:
            deployments.stop()
        self.store.close()


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(service, "POLL_INTERVAL_S", 0.02)
    made = Fleet(tmp_path / "coordinator")
    yield made
    made.close()
    assert made.fatal == []


def wish(**changes: Any) -> DeploymentRequest:
    return DeploymentRequest(**{"model": "r1", **changes})


def test_devices_with_data_for_the_task_are_told_and_nobody_else(fleet: Fleet) -> None:
    fleet.add("a")
    fleet.add("other", tasks=("mnist",))
    fleet.add(EVALUATOR_NAME)
    fleet.add("away", is_online=False)
    deployments = fleet.start()
    record = deployments.submit(wish())[0]
    eventually(lambda: fleet.commands)
    assert fleet.commands == [("a", "deploy", record.deployment_id)]
    assert fleet.stages(record.deployment_id) == {"a": "notified", "away": "notified"}
    ((task, options, model),) = fleet.exported
    assert (task, options, model) == (
        "digits",
        {"model": "logistic"},
        fleet.directory.models / f"{MODEL}.safetensors",
    )
    offer = deployments.make_offer(record.deployment_id, "a")
    assert (offer["model"], offer["bytes"], offer["test_fraction"]) == (MODEL, 7, 0.3)
    assert deployments.get_file(record.deployment_id, "a").read_bytes() == b"a model"
    for name in ("other", "nobody"):
        with pytest.raises(NotFoundError, match="is not for"):
            deployments.make_offer(record.deployment_id, name)


def sign_model(fleet: Fleet, folder: Path, model: str = MODEL) -> str:
    """Brings a signed bundle of a model to the coordinator; returns its hash."""
    file = folder / "digits.onnx"
    file.write_bytes(b"a signed model")
    made = Signer(folder).model_bundle(folder / "m.bundle", file, model=model)
    with closing(fleet.bundles.start_upload()) as upload:
        upload.write(made.read_bytes())
        return upload.complete().sha256


def test_boards_that_demand_signatures_are_named_unless_the_model_is_signed(fleet: Fleet, tmp_path: Path) -> None:
    fleet.add("a")
    fleet.add("strict")
    fleet.registry.record_capabilities("strict", Capabilities(facts={"signed_models": True}, shards={"digits": 5}))
    deployments = fleet.start()
    with pytest.raises(UsageError, match="strict run only signed models: edgefl model export"):
        deployments.submit(wish())
    assert deployments.submit(wish(devices=("a",)))[0]
    config = parse_run({"run": {"task": "digits"}, "models": {"auto_deploy": True}})
    plan_deployments(deployments, fleet.store, "r1", config)()
    assert any(
        "strict run only signed models" in row["message"] for row in list_events_after(fleet.store, 0, limit=9)
    )
    record = deployments.submit(wish(bundle=sign_model(fleet, tmp_path)))[0]
    eventually(lambda: fleet.stages(record.deployment_id) == {"a": "notified", "strict": "notified"})
    offer = deployments.make_offer(record.deployment_id, "strict")
    assert SignedManifest.decode(offer["signed"]).manifest.wheels[0].sha256 == offer["sha256"]
    assert deployments.get_file(record.deployment_id, "strict").read_bytes() == b"a signed model"
    assert len(fleet.exported) == 1, "a signed file is not made anew"


def test_a_signed_bundle_of_something_else_is_not_deployed(fleet: Fleet, tmp_path: Path) -> None:
    fleet.add("a")
    with pytest.raises(UsageError, match=f"model model-digits was signed, and not model {MODEL[:12]}"):
        fleet.start().submit(wish(bundle=sign_model(fleet, tmp_path, "cd" * 32)))


def test_what_a_device_reports_is_kept_and_ends_the_deployment(fleet: Fleet) -> None:
    fleet.add("a")
    fleet.add("b")
    record = fleet.start().submit(wish())[0]
    eventually(lambda: len(fleet.commands) == 2)
    name = record.deployment_id
    fleet.say("a", "running", name, name, accuracy=0.9, former_accuracy=0.8, num_examples=12)
    fleet.say("b", "rejected", name, None, accuracy=0.1, reason="worse\0")
    eventually(lambda: str(fleet.store.deployments.get(name).status) == "done")
    a, b = fleet.store.deployments.list_devices(name)
    assert (str(a.state), a.accuracy, a.former_accuracy, a.num_examples) == ("running", 0.9, 0.8, 12)
    assert (str(b.state), b.reason) == ("rejected", "worse")


def test_a_report_that_makes_no_sense_changes_nothing(fleet: Fleet) -> None:
    fleet.add("a")
    name = fleet.start().submit(wish())[0].deployment_id
    eventually(lambda: fleet.commands)
    for state, deployment in (
        ("running", "x"),
        ("exploded", name),
        ("notified", name),
        ("reverted", name),
        (["x"], name),
    ):
        fleet.say("a", state, deployment, accuracy="high")  # type: ignore[arg-type]
        settled(fleet.running[-1])
    assert fleet.stages(name) == {"a": "notified"}
    fleet.say("a", "running", name, name, accuracy="high", num_examples=True)
    eventually(lambda: fleet.stages(name)["a"] == "running")
    (row,) = fleet.store.deployments.list_devices(name)
    assert (row.accuracy, row.num_examples) == (None, None)


def test_a_device_is_told_when_its_subscriptions_stand_and_again_unless_it_is_at_it_or_runs_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.add("a", is_online=False)
    fleet.registry.record_status("a", StatusMessage(state="online", boot_id="b", session_no=1))
    fleet.add("busy")
    name = fleet.start().submit(wish())[0].deployment_id
    eventually(lambda: fleet.heard("busy"))
    fleet.say("busy", "fetching", name)
    settled(fleet.running[-1])
    assert (fleet.heard("a"), fleet.heard("busy")) == (0, 1)
    monkeypatch.setattr(service, "RESEND_AFTER_S", 0.0)
    fleet.say("a")
    eventually(lambda: fleet.heard("a") > 1)
    assert (fleet.heard("busy"), len(set(fleet.ids))) == (1, len(fleet.ids))
    fleet.say("a", "running", name, name)
    eventually(lambda: fleet.stages(name)["a"] == "running")
    settled(fleet.running[-1])
    heard = fleet.heard("a")
    fleet.say("a")  # a state directory that was put back, say
    eventually(lambda: fleet.heard("a") > heard)


def test_a_failed_canary_sends_the_others_back_until_they_say_so(fleet: Fleet) -> None:
    for name in "abcd":
        fleet.add(name)
    record = fleet.start().submit(wish(canary=2))[0]
    assert record.canary == 3, "two would not pass a model on"
    name = record.deployment_id
    eventually(lambda: len(fleet.commands) == 3)
    fleet.say("a", "running", name, name)
    fleet.say("b", "failed", name, None, reason="no room")
    eventually(lambda: fleet.heard("a", "rollback"))
    assert fleet.store.deployments.get(name).reason == "canary b: no room"
    assert fleet.stages(name) == {"a": "reverting", "b": "failed", "c": "reverting", "d": "superseded"}
    with pytest.raises(NotFoundError):
        fleet.running[0].make_offer(name, "a")
    fleet.say("a", "reverted", name, None)
    eventually(lambda: fleet.stages(name)["a"] == "reverted")
    assert fleet.heard("d") == 0


@pytest.mark.parametrize("stage", ["preparing", "notified", "reverting"])
def test_a_coordinator_that_starts_again_goes_on_where_it_was(fleet: Fleet, stage: str) -> None:
    fleet.add("a")
    first = fleet.start()
    record = first.submit(wish())[0]
    eventually(lambda: fleet.commands)
    first.stop()
    name = record.deployment_id
    if stage == "preparing":
        fleet.store.deployments.update(name, status="preparing", onnx_sha256=None)
        fleet.store.deployments.update_devices(name, {"a": {"state": "pending"}})
    elif stage == "reverting":
        fleet.store.deployments.update(name, status="failed")
        fleet.store.deployments.update_devices(name, {"a": {"state": "reverting"}})
    fleet.commands.clear()
    fleet.start()
    eventually(lambda: fleet.commands)
    assert fleet.commands == [("a", "rollback" if stage == "reverting" else "deploy", name)]


@pytest.mark.parametrize("error", [TaskError("onnx is not installed"), ZeroDivisionError("odd")])
def test_a_model_that_cannot_be_exported_fails_the_deployment_and_tells_nobody(
    fleet: Fleet, error: Exception
) -> None:
    fleet.add("a")
    fleet.export_fails = error
    record = fleet.start().submit(wish())[0]
    eventually(lambda: str(fleet.store.deployments.get(record.deployment_id).status) == "failed")
    assert fleet.store.deployments.get(record.deployment_id).reason == f"the model cannot be exported: {error}"
    assert fleet.commands == []


def test_a_device_that_joins_later_is_told_of_the_newest_deployment_for_everybody(fleet: Fleet) -> None:
    fleet.add("a")
    deployments = fleet.start()
    first, second = deployments.submit(wish())[0], deployments.submit(wish())[0]
    eventually(lambda: fleet.stages(second.deployment_id) == {"a": "notified"})
    fleet.say("a", "running", second.deployment_id, second.deployment_id)
    eventually(lambda: fleet.stages(second.deployment_id) == {"a": "running"})
    only = deployments.submit(wish(devices=("a",)))[0]
    eventually(lambda: fleet.stages(only.deployment_id) == {"a": "notified"})
    fleet.add("late")
    eventually(lambda: ("late", "deploy", second.deployment_id) in fleet.commands)
    assert "late" not in {**fleet.stages(first.deployment_id), **fleet.stages(only.deployment_id)}
    assert fleet.stages(first.deployment_id) == {"a": "superseded"}


def test_a_device_that_gets_data_for_a_newer_model_is_told_of_it_when_it_has_answered_the_one_before(
    fleet: Fleet,
) -> None:
    config = parse_run({"run": {"task": "mnist"}, "task": {"model": "logistic"}})
    fleet.store.add_run(
        run_id="r2", name="second", task="mnist", strategy="fedavg", config=config.to_json(), seed=7, submitted_at=2.0
    )
    row = SavedModelRow(version=1, round=1, last_record=1, sha256="cd" * 32, bytes_file=1, at=1.0, accuracy=0.5)
    fleet.store.record_saved_model("r2", row)
    fleet.add("a")
    fleet.add("b", tasks=("mnist",))
    deployments = fleet.start()
    first, second = deployments.submit(wish())[0], deployments.submit(wish(model="r2"))[0]
    eventually(lambda: ("b", "deploy", second.deployment_id) in fleet.commands)
    fleet.add("a", tasks=("digits", "mnist"))
    settled(fleet.running[-1])
    assert fleet.stages(second.deployment_id) == {"b": "notified"}
    fleet.say("a", "running", first.deployment_id, first.deployment_id)
    eventually(lambda: ("a", "deploy", second.deployment_id) in fleet.commands)


@pytest.mark.parametrize(
    ("changes", "kind", "expected"),
    [
        ({"model": "nothing"}, NotFoundError, "no model 'nothing'"),
        ({"model": "ffffff"}, NotFoundError, "no kept model begins with 'ffffff'"),
        ({"devices": ("nobody",)}, NotFoundError, "no device 'nobody'"),
        ({"devices": ("other",)}, UsageError, "other has no shard for task digits"),
        *(
            (changes, ConfigError, "")
            for changes in (
                {"canary": -1},
                {"canary_s": 0},
                {"canary_s": 1e9},
                {"tolerance": 2.0},
                {"min_accuracy": -0.1},
            )
        ),
    ],
)
def test_what_cannot_be_deployed_is_one_line(
    fleet: Fleet, changes: dict[str, Any], kind: type[EdgeflError], expected: str
) -> None:
    fleet.add("a")
    fleet.add("other", tasks=("mnist",))
    with pytest.raises(kind) as caught:
        fleet.start().submit(wish(**changes))[0]
    assert str(caught.value).startswith(expected)
    assert fleet.store.deployments.list_newest() == []


def test_a_model_is_found_by_whatever_shows_it(fleet: Fleet) -> None:
    fleet.add("a")
    deployments = fleet.start()
    for model in (MODEL, MODEL[:4], "r1", "first", "latest", "r1:1", "first:latest", "r1:best", "best"):
        assert deployments.submit(wish(model=model))[0].model == MODEL


def test_with_fewer_than_three_devices_canaries_are_refused_and_what_is_missing_is_said(fleet: Fleet) -> None:
    fleet.add("a")
    with pytest.raises(UsageError, match="when there are 3 or more, there are 1 devices: leave canary out"):
        fleet.start().submit(wish(canary=1))


def test_a_finished_run_deploys_its_model_only_if_it_asks_for_it(fleet: Fleet) -> None:
    for name in "abc":
        fleet.add(name)
    deployments = fleet.start()
    plan_deployments(deployments, fleet.store, "r1", parse_run({"run": {"task": "digits"}}))()
    assert fleet.store.deployments.list_newest() == []
    asking = {"run": {"task": "digits"}, "models": {"auto_deploy": True, "canary": 1}}
    plan_deployments(deployments, fleet.store, "r1", parse_run(asking))()
    (record,) = fleet.store.deployments.list_newest()
    assert (record.run_id, record.canary) == ("r1", 3)
    fleet.store.add_run(
        run_id="r2", name="none", task="digits", strategy="ifca", config=parse_run(asking).to_json(), seed=7,
        submitted_at=2.0,
    )  # fmt: skip
    plan_deployments(deployments, fleet.store, "r2", parse_run({**asking, "strategy": {"name": "ifca"}}))()
    assert failures(fleet) == ["run 'r2' has no kept model yet; `edgefl model list` shows what is kept"]


def test_nobody_waits_for_a_canary_that_was_taken_out_of_the_fleet(fleet: Fleet) -> None:
    for name in "abc":
        fleet.add(name)
    record = fleet.start().submit(wish(canary=1))[0]
    eventually(lambda: fleet.heard("a"))
    fleet.registry.remove("a")
    eventually(lambda: str(fleet.store.deployments.get(record.deployment_id).status) == "failed")
    assert fleet.store.deployments.get(record.deployment_id).reason == "canary a: it was taken out of the fleet"


@pytest.mark.parametrize("error", [StoreFullError("no room"), StoreBusyError("in use"), ZeroDivisionError("odd")])
def test_a_report_outlasts_what_hinders_that_it_is_kept(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    for name in ("pi-1", "pi-2"):
        fleet.add(name)
    made = fleet.start().submit(wish())[0].deployment_id
    eventually(lambda: len(fleet.commands) == 2)
    known, errors = fleet.store.deployments.list_of_device, [error]
    monkeypatch.setattr(
        fleet.store.deployments, "list_of_device", lambda name: _raise(errors.pop()) if errors else known(name)
    )
    fleet.say("pi-1", "running", made)
    fleet.say("pi-2", "running", made)
    eventually(lambda: fleet.stages(made) == {"pi-1": "running", "pi-2": "running"})
    assert errors == []


def _raise(error: Exception) -> NoReturn:
    raise error


RECORD = DeploymentRecord(
    deployment_id="d1", run_id="r", model="ab" * 32, task="digits", options={"model": "mlp"}, devices=None, canary=0,
    canary_s=60.0, tolerance=0.02, min_accuracy=0.0, test_fraction=0.1, status=RolloutStatus.PREPARING,
    created_at=1.0,
)  # fmt: skip


def export(task: str, options: Mapping[str, Any], model: Path, out: Path) -> None:
    out.write_text(f"{task} {dict(options)} {model.name}")


def broken(_task: str, _options: Mapping[str, Any], _model: Path, out: Path) -> None:
    out.write_text("half")
    raise TaskError("torch is not installed")


def test_the_file_is_named_by_its_content(tmp_path: Path) -> None:
    (tmp_path / ".d1.onnx").write_text("left behind")
    sha256, size = make_deployment_file(RECORD, export, models=tmp_path / "models", folder=tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.read_text() == f"digits {{'model': 'mlp'}} {'ab' * 32}.safetensors"
    assert (path.name, size) == (f"{sha256}.onnx", path.stat().st_size)
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_cannot_be_made_or_is_too_large_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="torch is not installed"):
        make_deployment_file(RECORD, broken, models=tmp_path, folder=tmp_path)
    with pytest.raises(UsageError, match="devices take 10 at most"):
        make_deployment_file(RECORD, export, models=tmp_path, folder=tmp_path, max_bytes=10)
    assert list(tmp_path.iterdir()) == []


def test_files_that_nobody_needs_go_and_those_being_made_stay(tmp_path: Path) -> None:
    for name in ("aa", "bb", ".d2"):
        (tmp_path / f"{name}.onnx").write_text("x")
    prune_deployment_files(tmp_path, {"aa"})
    assert {path.name for path in tmp_path.iterdir()} == {"aa.onnx", ".d2.onnx"}


def deployed(fleet: Fleet) -> list[list[str]]:
    """The devices of each deployment."""
    return [sorted(fleet.stages(record.deployment_id)) for record in fleet.store.deployments.list_newest()]


def failures(fleet: Fleet) -> list[str]:
    """What the events say of deployments that failed."""
    rows = list_events_after(fleet.store, 0, limit=99)
    return [row["message"] for row in rows if row["kind"] == "deployment-failed"]


def add_clusters(fleet: Fleet) -> RunConfig:
    """A run of two models: before version 2, `a` and `b` took the first, `c` the second, and afterwards `b` too.

    What `a` sent last was refused, and `d` says a number of no cluster.
    """
    config = parse_run({"run": {"task": "digits"}, "strategy": {"name": "ifca"}, "models": {"auto_deploy": True}})
    fleet.store.add_run(
        run_id="r2", name="kinds", task="digits", strategy="ifca", config=config.to_json(), seed=7, submitted_at=2.0
    )
    stack = {f"cluster-{number}/weight": np.full(3, number, np.float32) for number in range(2)}
    sha256, _ = save_model(fleet.directory.models, stack)
    row = SavedModelRow(version=2, round=2, last_record=1, sha256=sha256, bytes_file=1, at=2.0)
    fleet.store.record_saved_model("r2", row)
    takes = [("a", 0, 1), ("b", 0, 1), ("c", 0, 0), ("a", 1, 0), ("b", 1, 0), ("c", 1, 1), ("b", 2, 1), ("d", 1, 2),
             ("a", -1, 1)]  # fmt: skip
    fleet.store.record_updates(
        "r2",
        [
            UpdateRow(
                round=version + 1, assignment_id=f"{name}{version}", device_id=name, base_version=version,
                outcome="used" if version >= 0 else "rejected", metrics={"cluster": float(cluster)},
            )
            for name, version, cluster in takes
        ],
    )  # fmt: skip
    return config


def test_a_cluster_s_model_goes_to_the_devices_that_took_it_last_before_its_version(fleet: Fleet) -> None:
    for name in "abcd":
        fleet.add(name)
    add_clusters(fleet)
    deployments = fleet.start()
    first, second = (deployments.submit(wish(model="r2", cluster=number))[0] for number in (0, 1))
    assert (set(fleet.stages(first.id)), set(fleet.stages(second.id))) == ({"a", "b"}, {"c"})
    eventually(lambda: len(fleet.exported) == 2)
    for record, number in ((first, 0), (second, 1)):
        (model,) = (path for _, _, path in fleet.exported if path.stem == record.model)
        assert {name: set(tensor) for name, tensor in load_model_file(model).items()} == {"weight": {number}}
    third = deployments.submit(wish(model="r2", cluster=1, devices=("d",)))[0]
    assert (set(fleet.stages(third.id)), third.model) == ({"d"}, second.model)


def test_a_finished_run_with_clusters_deploys_each_one_s_model(fleet: Fleet) -> None:
    for name in "abc":
        fleet.add(name)
    plan_deployments(fleet.start(), fleet.store, "r2", add_clusters(fleet))()
    assert sorted(deployed(fleet)) == [["a", "b"], ["c"]]


def test_a_cluster_whose_model_cannot_be_deployed_is_an_event_and_the_others_are(fleet: Fleet) -> None:
    fleet.add("b")
    fleet.add("c")
    fleet.registry.record_capabilities("b", Capabilities(facts={"signed_models": True}, shards={"digits": 5}))
    plan_deployments(fleet.start(), fleet.store, "r2", add_clusters(fleet))()
    assert deployed(fleet) == [["c"]]
    assert [text.split(" run only")[0] for text in failures(fleet)] == ["cluster 0: b"]


@pytest.mark.parametrize("error", [StoreFullError("no room"), StoreError("read only"), PermissionError("not ours")])
def test_a_model_that_cannot_be_saved_at_the_end_of_a_run_is_an_event_of_its_cluster(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    for name in "abc":
        fleet.add(name)
    errors, started, config = [error], fleet.start(), add_clusters(fleet)
    monkeypatch.setattr(
        "edgefl.coordinator.rollouts.deployments.save_model",
        lambda *model: _raise(errors.pop()) if errors else save_model(*model),
    )
    with fleet.store.batch():
        plan_deployments(started, fleet.store, "r2", config)()
    assert (deployed(fleet), failures(fleet)) == ([["c"]], [f"cluster 0: {error}"])


def test_a_figure_of_a_cluster_in_a_run_with_one_model_counts_for_nothing(fleet: Fleet) -> None:
    fleet.add("a")
    row = UpdateRow(
        round=1, assignment_id="a0", device_id="a", base_version=0, outcome="used", metrics={"cluster": 0.0}
    )
    fleet.store.record_updates("r1", [row])
    config = parse_run({"run": {"task": "digits"}, "models": {"auto_deploy": True}})
    plan_deployments(fleet.start(), fleet.store, "r1", config)()
    assert (deployed(fleet), failures(fleet)) == ([["a"]], [])


def test_a_cluster_that_nobody_took_and_one_of_a_bundle_are_one_line(fleet: Fleet) -> None:
    fleet.add("a")
    add_clusters(fleet)
    deployments = fleet.start()
    with pytest.raises(UsageError, match=r"no device .* took the model of cluster 1 last .* taken were 0, 1"):
        deployments.submit(wish(model="r2", cluster=1))
    with pytest.raises(UsageError, match="run r2 has no cluster 5, it has cluster 0 to"):
        deployments.submit(wish(model="r2", cluster=5))
    with pytest.raises(UsageError, match="run r1 has no cluster 0, it has one model; leave --cluster out"):
        deployments.submit(wish(model="r1", cluster=0))
    with pytest.raises(DataError, match="0 to 1, got 5"):
        deployments.submit(wish(model="r2", cluster=5, devices=("a",)))
    with pytest.raises(ConfigError, match="a signed bundle has one cluster's model"):
        wish(cluster=0, bundle="ab" * 32)
    assert fleet.store.deployments.list_newest() == []
