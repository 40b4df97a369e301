"""Routers of the coordinator's HTTPS API, beside Flower's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import APIRouter

from edgefl.coordinator.api.certificates import certificates_router
from edgefl.coordinator.api.deployments import deployment_router, require_device
from edgefl.coordinator.api.installations import installation_router
from edgefl.coordinator.api.models import model_router
from edgefl.coordinator.api.operator_routes import operator_router
from edgefl.coordinator.api.page import PageContext, page_router
from edgefl.coordinator.api.run_control import run_control_router
from edgefl.coordinator.auth import AuthFailurePolicy, make_permission_check, require_operator, require_viewer
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.enrolment.enrolment_service import EnrolmentService, enrolment_router
from edgefl.coordinator.enrolment.reenrolment import ReenrolmentService, reenrolment_router
from edgefl.coordinator.enrolment.renewal import RenewalService, renewal_router
from edgefl.coordinator.enrolment.rotation import CertificateRotation
from edgefl.coordinator.execution.rpc import DeviceRpc
from edgefl.coordinator.fleet.draining import DrainController
from edgefl.coordinator.fleet.membership import Membership
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.monitoring.metrics import Metrics, metrics_router
from edgefl.coordinator.rollouts.deployments import DeploymentService
from edgefl.coordinator.rollouts.installations import InstallationService
from edgefl.coordinator.runs.scheduler import RunScheduler
from edgefl.coordinator.web.curve_cache import CurveCache
from edgefl.coordinator.web.dashboard import dashboard_router
from edgefl.coordinator.web.feed import Feed
from edgefl.core.config import RunConfig
from edgefl.core.types import Json
from edgefl.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """Services of the routes; `host` is the address that the coordinator listens on.

    `check` raises an EdgeflError for an invalid run file and returns notes on a valid one; `plan` also returns the
    run's plan; `remove` removes a device from the fleet; `auth_failures` handles failed authentication.
    """

    host: str
    directory: CoordinatorDirectory
    store: Store
    registry: DeviceRegistry
    members: Membership
    run_scheduler: RunScheduler
    device_rpc: DeviceRpc
    deployments: DeploymentService
    installations: InstallationService
    drain_controller: DrainController
    feed: Feed
    metrics: Metrics
    enrolment: EnrolmentService
    renewal: RenewalService
    reenrolment: ReenrolmentService
    rotation: CertificateRotation
    remove: Callable[[str], None]
    auth_failures: AuthFailurePolicy
    check: Callable[[RunConfig], Json]
    plan: Callable[[RunConfig], Json]


def make_routers(context: ApiContext) -> list[APIRouter]:
    """Returns the routers; the last one is the fallback."""
    directory, store, scheduler = context.directory, context.store, context.run_scheduler
    viewer = require_viewer(directory, listen_host=context.host, auth_failures=context.auth_failures)
    operator = require_operator(directory, auth_failures=context.auth_failures)
    page = PageContext(
        directory=directory,
        store=store,
        feed=context.feed,
        curves=CurveCache(store),
        drain_controller=context.drain_controller,
        check=context.check,
        check_permissions=make_permission_check(directory, listen_host=context.host),
    )
    device = require_device(context.members.find_signer, record_rejection=context.auth_failures.record_rejection)
    return [
        enrolment_router(context.enrolment, record_rejection=context.auth_failures.record_rejection),
        renewal_router(context.renewal, device_check=device),
        reenrolment_router(context.reenrolment, record_rejection=context.auth_failures.record_rejection),
        certificates_router(rotation=context.rotation, remove=context.remove, operator=operator),
        run_control_router(
            store=store,
            run_scheduler=scheduler,
            device_rpc=context.device_rpc,
            plan=context.plan,
            viewer=viewer,
            operator=operator,
        ),
        operator_router(
            store=store,
            registry=context.registry,
            run_scheduler=scheduler,
            check=context.check,
            viewer=viewer,
            operator=operator,
            record_rejection=context.auth_failures.record_rejection,
        ),
        model_router(store=store, folder=directory.models, viewer=viewer),
        deployment_router(
            store=store,
            deployments=context.deployments,
            viewer=viewer,
            operator=operator,
            device=device,
        ),
        installation_router(
            store=store,
            installations=context.installations,
            viewer=viewer,
            operator=operator,
            device=require_device(context.members.find_signer),
        ),
        metrics_router(context.metrics.render, viewer),
        page_router(page, viewer=viewer, operator=operator),
        dashboard_router(),
    ]
