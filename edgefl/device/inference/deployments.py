"""Deployments on the device: a fetched model is checked on local data, and activated or rejected.

The store holds files by SHA-256, and a state file that names the current one. It is replaced atomically, so a power
cut leaves the former or the new model, never a mix. The former model is kept, for a rollback.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from edgefl.core.errors import BundleError, DataError
from edgefl.core.protocol import MAX_MODEL_BYTES
from edgefl.core.safe_parsing import SHA256, parse_json, parse_record
from edgefl.core.types import Json
from edgefl.device.inference.onnx_model import ModelCheckRequest, ModelCheckResult, check_in_subprocess
from edgefl.device.rollouts.client import RolloutClient, RolloutReport
from edgefl.device.rollouts.download import Artefact
from edgefl.device.state_dir import DeviceStateDir
from edgefl.device.updates.slots import MODELS_FOLDER, SoftwareUpdateConfig, load_update_config
from edgefl.system.atomic_files import compute_sha256, make_private_directory, write_atomic
from edgefl.system.bundles.archive import BundleKind, SignedManifest
from edgefl.system.bundles.keys import LIST_FILE, TrustedKeys

log = logging.getLogger(__name__)

STATE_FILE = "current.json"
STATE_FORMAT = 1
UNSIGNED_REASON = (
    "it is unsigned, and this board runs only models that its signers have signed: edgefl coordinator sign"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedModel:
    """Deployed model: `sha256` names its file, `model` the tensors that it was made from.

    `signed` is its manifest with the signatures, as `SignedManifest.encode` writes them.
    """

    deployment: str
    sha256: str
    model: str
    task: str
    accuracy: float | None = None
    signed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentState:
    """Persistent state of deployments.

    `serials` holds those of the newest signed model by name: one that was signed before is not taken again.
    """

    current: DeployedModel | None = None
    former: DeployedModel | None = None
    report: RolloutReport | None = None
    serials: Mapping[str, int] = field(default_factory=dict)


class ModelStore:
    """Model folder of a state directory; written by one agent, read by others.

    Args:
        state_dir: of the device.
        config: says whose signatures a model needs.
    """

    def __init__(self, state_dir: Path, config: SoftwareUpdateConfig | None = None) -> None:
        self._state_dir, self.folder = state_dir, state_dir / MODELS_FOLDER
        self._config = config or load_update_config()

    @property
    def state_path(self) -> Path:
        return self.folder / STATE_FILE

    def load(self) -> DeploymentState:
        """Returns the stored state; a damaged file counts as none, with a warning."""
        try:
            value = parse_json(self.state_path.read_bytes())
            return _parse_state(value)
        except FileNotFoundError:
            return DeploymentState()
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s is damaged and left aside: %s", self.state_path, error)
            return DeploymentState()

    def save(self, state: DeploymentState) -> None:
        """Replaces the state file, durably.

        Raises:
            StoreError: it cannot be written; the former one stays.
        """
        make_private_directory(self.folder)
        write_atomic(self.state_path, json.dumps({"v": STATE_FORMAT, **asdict(state)}).encode())

    def path(self, model: DeployedModel) -> Path:
        return self.folder / f"{model.sha256}.onnx"

    def load_keys(self) -> TrustedKeys:
        """Returns the keys one of which must have signed a model; raises as `SoftwareUpdateConfig.load_keys`."""
        return self._config.load_keys(self._state_dir)

    def follow(self, signed: SignedManifest) -> TrustedKeys:
        """Returns the trusted keys after the lists of signers of a model, which are kept; raises `BundleError`."""
        former = self.load_keys()
        trusted = former.follow(signed.signatures.lists)
        make_private_directory(self.folder)
        trusted.save(self.folder / LIST_FILE, former)
        return trusted

    def get_permitted_path(self, model: DeployedModel) -> Path:
        """Returns the file of a deployed model that this board may run, as it is trusted now.

        Raises:
            BundleError: the board trusts signers, and none of them has signed this file.
            DataError: there is none.
        """
        path, trusted = self.path(model), self.load_keys()
        if trusted.keys:
            signed = _decode_signed(model.signed)
            # It was accepted in time: that its manifest has expired since does not stop it.
            trusted.check_signers(signed)
            try:
                sha256, num_bytes = compute_sha256(path), path.stat().st_size
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}") from None
            check_content(signed, sha256=sha256, num_bytes=num_bytes)
        return path

    def activate(self, state: DeploymentState, new: DeployedModel, report: RolloutReport) -> DeploymentState:
        """Makes `new` the current model and returns the new state."""
        # A model deployed twice must not replace the former one, which is needed for a rollback.
        former = state.former if state.current and state.current.sha256 == new.sha256 else state.current
        serials = dict(state.serials)
        if new.signed is not None:
            manifest = SignedManifest.decode(new.signed).manifest
            serials[manifest.name] = max(manifest.serial, serials.get(manifest.name, 0))
        new_state = DeploymentState(current=new, former=former, report=report, serials=serials)
        self.save(new_state)
        return new_state

    def roll_back(self, state: DeploymentState, report: RolloutReport) -> DeploymentState:
        """Reactivates the former model; without one, the board has none."""
        new_state = DeploymentState(current=state.former, report=report, serials=state.serials)
        self.save(new_state)
        return new_state


def report_to_json(state: DeploymentState) -> Json | None:
    """Returns the heartbeat's report of the last deployment; `runs` is the deployment of the current model."""
    if state.report is None:
        return None
    return {**state.report.to_json(), "runs": state.current.deployment if state.current else None}


def _parse_state(value: Mapping[str, Any]) -> DeploymentState:
    if value.get("v") != STATE_FORMAT:
        raise ValueError(f"format {value.get('v')!r}, this program reads {STATE_FORMAT}")
    current, former = (parse_record(DeployedModel, value.get(name)) for name in ("current", "former"))
    report = parse_record(RolloutReport, value.get("report"))
    for model in (current, former):
        if model is not None and not SHA256.match(model.sha256):
            raise ValueError(f"no SHA-256: {model.sha256[:80]!r}")
    serials = {str(name): int(serial) for name, serial in value.get("serials", {}).items()}
    return DeploymentState(current=current, former=former, report=report, serials=serials)


def _decode_signed(text: str | None) -> SignedManifest:
    if text is None:
        raise BundleError(UNSIGNED_REASON)
    return SignedManifest.decode(text)


def check_content(signed: SignedManifest, *, sha256: str, num_bytes: int) -> None:
    """Raises `BundleError` unless a manifest is of this very model."""
    manifest = signed.manifest
    entry = manifest.wheels[0] if manifest.kind is BundleKind.MODEL else None
    if entry is None or (entry.sha256, entry.num_bytes) != (sha256, num_bytes):
        raise BundleError(f"{manifest.kind} {manifest.name} was signed, and not this file of {num_bytes} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOffer:
    """Coordinator's description of a model before its download; `signed` is its manifest with the signatures."""

    sha256: str
    num_bytes: int
    model: str
    task: str
    options: Mapping[str, Any]
    tolerance: float
    min_accuracy: float
    test_fraction: float
    signed: str | None = None

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """Returns the offer in an answer of the coordinator; raises DataError for a malformed one."""
        try:
            return cls(
                sha256=str(value["sha256"]),
                num_bytes=int(value["bytes"]),
                model=str(value["model"]),
                task=str(value["task"]),
                options=dict(value["options"]),
                tolerance=float(value["tolerance"]),
                min_accuracy=float(value["min_accuracy"]),
                test_fraction=float(value["test_fraction"]),
                signed=None if value.get("signed") is None else str(value["signed"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the coordinator's offer makes no sense: {error!r}") from None


class DeployedModels:
    """Handler of rollouts that bring a model.

    Args:
        state: the device's state directory.
        config: says whose signatures a model needs.
        check_model: evaluates a model.
    """

    artefact = Artefact(rollout="deployment", name="model", suffix=".onnx", max_bytes=MAX_MODEL_BYTES)
    cancels_running = True

    def __init__(
        self,
        state: DeviceStateDir,
        config: SoftwareUpdateConfig | None = None,
        *,
        check_model: Callable[[ModelCheckRequest], ModelCheckResult] = check_in_subprocess,
    ) -> None:
        self._state_dir, self._check_model, self._store = state.root, check_model, ModelStore(state.root, config)
        self.folder, self._state = self._store.folder, self._store.load()

    @property
    def model(self) -> str | None:
        """Returns the SHA-256 of the current model's tensors; None without one."""
        current = self._state.current
        return current.model if current else None

    @property
    def report(self) -> RolloutReport | None:
        return self._state.report

    def encode_report(self) -> Json | None:
        return report_to_json(self._state)

    def set_report(self, report: RolloutReport) -> None:
        self._state = replace(self._state, report=report)

    def save(self) -> None:
        self._store.save(self._state)

    def list_used(self) -> Collection[str]:
        return {model.sha256 for model in (self._state.current, self._state.former) if model is not None}

    def find_result(self, rollout_id: str) -> RolloutReport | None:
        report, current = self._state.report, self._state.current
        known = report if report is not None and report.id == rollout_id and report.is_final else None
        if current is not None and current.deployment == rollout_id:
            # A late rollback of another deployment may have replaced this one's report.
            return known or RolloutReport(id=rollout_id, state="running", accuracy=current.accuracy)
        return known if known is not None and known.state != "running" else None

    def apply(self, rollout_id: str, client: RolloutClient[Any]) -> RolloutReport:
        client.save(RolloutReport(id=rollout_id, state="fetching"))
        offer, path = client.fetch(rollout_id, self._parse_offer)
        client.save(RolloutReport(id=rollout_id, state="checking"))
        scores = self._check(offer, path)
        client.queue.check_cancelled()
        report = RolloutReport(
            id=rollout_id,
            state="running",
            accuracy=scores.accuracy,
            former_accuracy=scores.former_accuracy,
            num_examples=scores.num_examples,
        )
        if (reason := rejection_reason(scores, offer)) is not None:
            return replace(report, state="rejected", reason=reason)
        deployed = DeployedModel(
            deployment=rollout_id,
            sha256=path.stem,
            model=offer.model,
            task=offer.task,
            accuracy=scores.accuracy,
            signed=offer.signed,
        )
        self._state = self._store.activate(self._state, deployed, report)
        log.info("runs model %s of deployment %s, %s", deployed.model[:12], rollout_id, format_score(scores))
        return report

    def roll_back(self, rollout_id: str) -> RolloutReport:
        """Reactivates the former model, if the current one is of this deployment."""
        report = RolloutReport(id=rollout_id, state="reverted")
        if self._state.current is not None and self._state.current.deployment == rollout_id:
            self._state = self._store.roll_back(self._state, report)
            log.warning("deployment %s is taken back; runs %s", rollout_id, (self.model or "no model")[:12])
        return report

    def _parse_offer(self, value: Json) -> ModelOffer:
        """Returns an offer whose signature is one that this board needs; nothing is fetched for another."""
        offer = ModelOffer.from_json(value)
        if not self._store.load_keys().keys:
            return replace(offer, signed=None)  # nobody here could say what it is worth
        signed = _decode_signed(offer.signed)
        manifest, serials = signed.manifest, self._state.serials
        self._store.follow(signed).verify(signed, max(time.time(), *serials.values(), 0))
        check_content(signed, sha256=offer.sha256, num_bytes=offer.num_bytes)
        facts = manifest.model
        if facts is None or (facts.sha256, facts.task, facts.options) != (offer.model, offer.task, offer.options):
            raise BundleError(f"{manifest.name} was signed for another task, with other options or of another model")
        if manifest.serial < serials.get(manifest.name, 0):
            raise BundleError(
                f"{manifest.name} was signed before what this board has (serial {manifest.serial}, it has "
                f"{serials[manifest.name]}); sign it anew if it is really needed"
            )
        return offer

    def _check(self, offer: ModelOffer, path: Path) -> ModelCheckResult:
        device, former = DeviceStateDir.load(self._state_dir).settings, self._state.current
        shard = device.shards.get(offer.task)
        if shard is None:
            raise DataError(f"this device has no shard for task {offer.task!r}; edgefl device shard add")
        return self._check_model(
            ModelCheckRequest(
                path=str(path),
                former_path=self._find_former_path(former) if former and former.task == offer.task else None,
                task=offer.task,
                options=offer.options,
                shard=shard,
                role=device.role,
                test_fraction=offer.test_fraction,
                state_dir=None if device.confine == "never" else str(self._state_dir),
            )
        )

    def _find_former_path(self, former: DeployedModel) -> str | None:
        """Returns the file of the former model; None where it must not be run."""
        try:
            return str(self._store.get_permitted_path(former))
        except (BundleError, DataError) as error:
            log.warning("the model before is not run any more: %s", error)
            return None


def rejection_reason(result: ModelCheckResult, offer: ModelOffer) -> str | None:
    """Returns why a model must not replace the former one, or None."""
    result_text = f"{format_score(result)} of its own"
    if result.accuracy is None:
        if offer.min_accuracy > 0:
            return f"{result_text}, an accuracy of {offer.min_accuracy:g} is asked for, and this model has none"
        loss, former = result.loss, result.former_loss
        is_worse = loss is not None and former is not None and loss > former * (1 + offer.tolerance)
    else:
        if result.accuracy < offer.min_accuracy:
            return f"{result_text}, at least {offer.min_accuracy:g} is asked for"
        former = result.former_accuracy
        is_worse = former is not None and result.accuracy < former - offer.tolerance
    return (
        f"{result_text}, the model before has {former:.4f} there (tolerance {offer.tolerance:g})"
        if is_worse
        else None
    )


def format_score(result: ModelCheckResult) -> str:
    """Returns how good a checked model is, in words."""
    scores = {"accuracy": result.accuracy, "loss": result.loss}
    known = [f"{name} {value:.4f}" for name, value in scores.items() if value is not None]
    return f"{known[0] if known else 'no score'} on {result.num_examples} examples"
