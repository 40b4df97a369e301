"""All that a coordinator answers over HTTPS beside Flower: puts the routers of its parts together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import APIRouter

from edgefl.config import RunConfig
from edgefl.coordinator.access import Watch, require_operator, require_viewer, rights
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.dispatch.questions import Questions
from edgefl.coordinator.fleet.draining import Draining
from edgefl.coordinator.fleet.membership import Membership
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.joining.enrolment import EnrolmentService, enrolment_router
from edgefl.coordinator.joining.readmission import ReadmissionService, readmission_router
from edgefl.coordinator.joining.renewal import RenewalService, renewal_router
from edgefl.coordinator.joining.rotation import Rotation
from edgefl.coordinator.monitoring.metrics import Metrics, metrics_router
from edgefl.coordinator.rollouts.deployments import Deployments
from edgefl.coordinator.rollouts.installations import Installations
from edgefl.coordinator.runs.worker import RunWorker
from edgefl.coordinator.web.api import operator_router
from edgefl.coordinator.web.certificates_api import certificates_router
from edgefl.coordinator.web.curve_book import CurveBook
from edgefl.coordinator.web.dashboard import dashboard_router
from edgefl.coordinator.web.deployment_api import deployment_router, require_device
from edgefl.coordinator.web.feed import Feed
from edgefl.coordinator.web.installation_api import installation_router
from edgefl.coordinator.web.jobs_api import jobs_router
from edgefl.coordinator.web.models_api import model_router
from edgefl.coordinator.web.page_api import PageSite, page_router
from edgefl.storage.store import Store
from edgefl.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """The parts that answer; `host` is what the coordinator listens on.

    `check` raises an EdgeflError for a run file that cannot work and returns what is to be said of one that can;
    `plan` also returns what the run would do; `remove` takes a device out of the
    fleet; `watch` is told of what was tried in vain.
    """

    host: str
    directory: CoordinatorDirectory
    store: Store
    roster: Roster
    members: Membership
    worker: RunWorker
    questions: Questions
    deployments: Deployments
    installations: Installations
    draining: Draining
    feed: Feed
    metrics: Metrics
    enrolment: EnrolmentService
    renewal: RenewalService
    readmission: ReadmissionService
    rotation: Rotation
    remove: Callable[[str], None]
    watch: Watch
    check: Callable[[RunConfig], Json]
    plan: Callable[[RunConfig], Json]


def all_routers(parts: Answering) -> list[APIRouter]:
    """Returns the routers; the last one takes what no other knows."""
    directory, store, worker = parts.directory, parts.store, parts.worker
    viewer = require_viewer(directory, listen_host=parts.host, watch=parts.watch)
    operator = require_operator(directory, watch=parts.watch)
    page = PageSite(
        directory=directory,
        store=store,
        feed=parts.feed,
        curves=CurveBook(store),
        draining=parts.draining,
        check=parts.check,
        rights=rights(directory, listen_host=parts.host),
    )
    device = require_device(parts.members.signed_by, note=parts.watch.note)
    return [
        enrolment_router(parts.enrolment, note=parts.watch.note),
        renewal_router(parts.renewal, device=device),
        readmission_router(parts.readmission, note=parts.watch.note),
        certificates_router(rotation=parts.rotation, remove=parts.remove, operator=operator),
        jobs_router(
            store=store,
            worker=worker,
            questions=parts.questions,
            plan=parts.plan,
            viewer=viewer,
            operator=operator,
        ),
        operator_router(
            store=store,
            roster=parts.roster,
            worker=worker,
            check=parts.check,
            viewer=viewer,
            operator=operator,
            note=parts.watch.note,
        ),
        model_router(store=store, folder=directory.models, viewer=viewer),
        deployment_router(
            store=store,
            deployments=parts.deployments,
            viewer=viewer,
            operator=operator,
            device=device,
        ),
        installation_router(
            store=store,
            installations=parts.installations,
            viewer=viewer,
            operator=operator,
            device=require_device(parts.members.signed_by),
        ),
        metrics_router(parts.metrics.text, viewer),
        page_router(page, viewer=viewer, operator=operator),
        dashboard_router(),
    ]
