"""Builds the objects of a job's run: it has no model, and its updates are the results of parts."""

from __future__ import annotations

import numpy as np

from edgefl.core.config import (
    RunConfig,
)
from edgefl.core.errors import CodecError, ConfigError
from edgefl.core.protocol import INSTRUCTION_VERSION, JOB_LIMITS, model_fingerprint
from edgefl.core.types import (
    Tensors,
)
from edgefl.engine.assembly.components import RunComponents
from edgefl.engine.assembly.rules import make_selection
from edgefl.engine.divergence import DivergenceRule
from edgefl.engine.progress import RoundCounter, StoppingCriteria
from edgefl.strategies.job_strategy import RESULT, JobStrategy
from edgefl.strategies.participation import EvaluationSchedule, RunParticipationPolicy
from edgefl.strategies.update_guard import (
    UpdateGuard,
)
from edgefl.tasks.job import CheckedJob, make_job
from edgefl.tasks.registry import is_torch_task


def build_job(config: RunConfig, run_id: str) -> RunComponents:
    """Returns the objects of a job's run: it has no model, and its updates are the results of parts."""
    section, devices = config.job, config.devices
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

    return RunComponents(
        config=config,
        model={},
        strategy=JobStrategy(
            combine=checked_job.combine,
            num_parts=num_parts,
            names=devices.names,
            min_devices=devices.min,
            deadline_s=section.deadline_s,
            max_tries=section.max_tries,
            skip_missing_s=section.skip_missing_s,
            max_part_bytes=section.max_part_bytes,
        ),
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
            "options": dict(section.options),
            "seed": config.run.seed,
            "test_fraction": 0.0,
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
        encode_input=checked_job.make_input,
    )
