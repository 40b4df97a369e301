"""Builds the objects of a job's run: it has no model, and its updates are the results of parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgefl.compression.codec import make_codec
from edgefl.compression.codec_selection import parse_auto_candidates
from edgefl.compression.delta import parse_downlink_codec
from edgefl.compression.error_feedback import has_error_feedback
from edgefl.compression.registry import format_with_layers
from edgefl.core.config import CompressionSection, RunConfig
from edgefl.core.errors import CodecError, ConfigError
from edgefl.core.metrics import ReplyMetrics
from edgefl.core.protocol import APP_CODING_KEY, INSTRUCTION_VERSION, JOB_LIMITS, model_fingerprint
from edgefl.core.settings import Faults
from edgefl.core.types import Strategy, Tensors, Update, derive_seed
from edgefl.engine.assembly.components import RunComponents
from edgefl.engine.assembly.rules import make_selection
from edgefl.engine.assembly.split import name_codec_errors
from edgefl.engine.divergence import DivergenceRule
from edgefl.engine.progress import RoundCounter, StoppingCriteria
from edgefl.flower.app_bundle import NO_PUBLISHER, AppBundle, get_publisher, make_bundle
from edgefl.flower.app_job import FlowerApp
from edgefl.strategies.job_strategy import RESULT, JobStrategy
from edgefl.strategies.participation import EvaluationSchedule, RunParticipationPolicy
from edgefl.strategies.update_guard import (
    UpdateGuard,
)
from edgefl.tasks.job import CheckedJob, make_job
from edgefl.tasks.registry import is_torch_task

if TYPE_CHECKING:
    from edgefl.flower.app_strategy import AppStrategy

log = logging.getLogger(__name__)


def build_job(config: RunConfig, run_id: str, bases: Path | None = None) -> RunComponents:
    """Returns the objects of a job's run: it has no model, and its updates are the results of parts.

    Args:
        config: of the run.
        run_id: of the run.
        bases: a folder in the coordinator's own, which no ServerApp may read.
    """
    section = config.job
    job = make_job(section.name, section.options)
    num_parts = None if section.parts == "boards" else section.parts
    if (num_parts or 0) * section.max_part_bytes > config.run.max_state_bytes:
        raise ConfigError(
            f"job.parts: {num_parts} parts of job.max_part_bytes = {section.max_part_bytes} are more than "
            f"run.max_state_bytes = {config.run.max_state_bytes}; lower the first or raise the second"
        )
    checked_job = CheckedJob(
        section.name,
        job,
        num_parts=num_parts or 0,
        max_part_bytes=section.max_part_bytes,
        max_result_bytes=section.max_result_bytes,
    )

    def decode(body: bytes) -> Tensors:
        if len(body) > section.max_part_bytes:
            raise CodecError(f"a result of {len(body)} bytes, at most {section.max_part_bytes} are taken")
        return {RESULT: np.frombuffer(body, np.uint8)}

    strategy: Strategy[Any]
    make_input: Callable[[int], bytes]
    read_reply: Callable[[Update], ReplyMetrics] | None = None
    make_app_bundle: Callable[[], AppBundle] | None = None
    if isinstance(job, FlowerApp):
        from edgefl.flower import app_strategy as flower  # noqa: PLC0415 Flower is heavy

        read_reply = flower.read_reply
        if get_publisher(job.app) is None:
            log.warning("%s: %s", job.app.name, NO_PUBLISHER)
        else:
            make_app_bundle = partial(make_bundle, job.app, job.run_config)
        app_strategy = _make_app_strategy(config, run_id, job, bases)
        strategy, make_input = app_strategy, app_strategy.make_input
    else:
        if config.compression != CompressionSection():
            raise ConfigError(f"compression means nothing for {section.name}, which is no Flower app; leave it out")
        strategy, make_input = _make_job_strategy(config, checked_job, num_parts), checked_job.make_input
    return RunComponents(
        config=config,
        model={},
        strategy=strategy,
        rounds=RoundCounter(versions_per_round=1),
        policy=RunParticipationPolicy(
            selection=make_selection(config),
            guard=UpdateGuard(refusals_before_quarantine=section.max_failures),
            counts_failures=True,
        ),
        goal=StoppingCriteria(rounds=1, seconds=config.run.seconds, bytes=config.run.bytes),
        evaluate=EvaluationSchedule(evaluate_on="none"),
        header={
            "v": INSTRUCTION_VERSION,
            "run": run_id,
            "task": section.name,
            # A board with other files of an app refuses, also where the run file does not say which it is of.
            "options": {
                **section.options,
                **({"fingerprint": job.fingerprint} if isinstance(job, FlowerApp) else {}),
            },
            "seed": config.run.seed,
            "test_fraction": 0.0,
            **({APP_CODING_KEY: True} if _has_app_coding(config) else {}),
            JOB_LIMITS: {
                "num_parts": num_parts or 0,
                "max_part_bytes": section.max_part_bytes,
                "deadline_s": section.deadline_s,
            },
        },
        layout=model_fingerprint(job.shapes()),
        shapes=(),
        encode=lambda _model, _version: b"",
        encode_changes=None,
        decode=decode,
        divergence=DivergenceRule(),
        needs_torch=is_torch_task(job),
        encode_input=make_input,
        read_reply=read_reply,
        make_bundle=make_app_bundle,
    )


def _has_app_coding(config: RunConfig) -> bool:
    """Returns whether a run is of a Flower app with codecs that not all agents know."""
    section = config.compression
    return has_error_feedback(section.up) or section.down != CompressionSection().down


def _make_job_strategy(config: RunConfig, checked_job: CheckedJob, num_parts: int | None) -> JobStrategy:
    section, devices = config.job, config.devices
    return JobStrategy(
        combine=checked_job.combine,
        num_parts=num_parts,
        names=devices.names,
        min_devices=devices.min,
        deadline_s=section.deadline_s,
        max_tries=section.max_tries,
        skip_missing_s=section.skip_missing_s,
        max_part_bytes=section.max_part_bytes,
    )


def _make_app_strategy(config: RunConfig, run_id: str, app: FlowerApp, bases: Path | None) -> AppStrategy:
    from edgefl.flower.app_strategy import AppStrategy  # noqa: PLC0415 Flower is heavy
    from edgefl.flower.server_link import LOG_NAME, ServerLink  # noqa: PLC0415 likewise

    section, number, codec = config.job, derive_seed("flower-run", run_id) % 2**63, _make_codec_line(config)
    setup = {
        "root": str(app.root),
        "server": app.app.server,
        "run_config": app.run_config,
        "run_id": number,
        "seed": config.run.seed,
        "seeded": ["torch"] if app.needs_torch else [],
        "codec": codec,
        "down": "" if (down := config.compression.down) == "dense" else down,
    }
    link = ServerLink(
        setup,
        secret=Path("/nonexistent") if bases is None else bases.parent,
        deadline_s=section.deadline_s,
        max_body_bytes=section.max_part_bytes,
        kept_log=None if bases is None else bases.parent / "runs" / run_id / LOG_NAME,
    )
    return AppStrategy(
        link=link,
        header={"run": run_id, "run_id": number, **({"codec": codec} if codec else {})},
        min_devices=config.devices.min,
        deadline_s=section.deadline_s,
        max_part_bytes=section.max_part_bytes,
        max_state_bytes=config.run.max_state_bytes,
        max_result_bytes=section.max_result_bytes,
    )


def _make_codec_line(config: RunConfig) -> str:
    """Returns the codec of what boards change in an app's arrays; empty where they travel as they are.

    Raises:
        ConfigError, CodecError: a setting does not go with an app.
    """
    section, faults = config.compression, Faults()
    with name_codec_errors("compression.down"):
        if parse_auto_candidates(section.down) is not None or parse_downlink_codec(section.down)[0]:
            faults.messages.append(
                "compression.down must be a codec of whole models for a Flower app, without auto and delta, "
                f"got {section.down!r}"
            )
    if section.metered is not None:
        faults.messages.append(
            "compression.metered must be left out for a Flower app, all of whose boards send by one codec, "
            f"got {section.metered!r:.80}"
        )
    if section.residuals != "periodic":
        faults.messages.append("compression.residuals means nothing for a Flower app; leave it out")
    with name_codec_errors("compression.up"):
        if parse_auto_candidates(section.up) is not None:
            faults.messages.append("compression.up must be one codec for a Flower app, got 'auto'")
        faults.check()
        line = format_with_layers(section.up, section.layers)
        make_codec(line, ())
    return "" if line == "dense" else line
