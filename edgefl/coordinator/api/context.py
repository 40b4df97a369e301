"""Services of the HTTPS API, and the checks that admit its callers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgefl.coordinator.api.access import Authenticator
from edgefl.coordinator.api.feed import Feed
from edgefl.coordinator.auth import AccessCheck, RecordRejection
from edgefl.coordinator.device_clients import DeviceClients
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.enrolment.certificates import CertificateRotation
from edgefl.coordinator.enrolment.enrolment_service import EnrolmentService, RenewalService
from edgefl.coordinator.fleet.membership import DrainController
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.split.service import SplitRuns
from edgefl.core.config import RunConfig
from edgefl.core.types import Json
from edgefl.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """Services of the routes.

    Attributes:
        viewer, operator, admin, device: admit those who may read, run and deploy, manage, and devices of the fleet.
        signer: admits devices by the headers of their request; the route checks the body.
        split_runs: the runs of networks that are cut.
        auth: finds out who calls, and has the sessions of pages.
        record_rejection: called for rejected requests.
        remove_device: removes a device from the fleet.
        add_supernode: adds a stock SuperNode of Flower: name, key, jobs, groups.
        check_run: raises an EdgeflError for an invalid run file, and returns notes on a valid one.
        plan_run: the same, and returns the run's plan.
        render_metrics: returns the response to a scrape.
    """

    viewer: AccessCheck
    operator: AccessCheck
    admin: AccessCheck
    device: AccessCheck
    signer: AccessCheck
    auth: Authenticator
    record_rejection: RecordRejection
    directory: CoordinatorDirectory
    store: Store
    registry: DeviceRegistry
    clients: DeviceClients
    drain_controller: DrainController
    enrolment: EnrolmentService
    renewal: RenewalService
    rotation: CertificateRotation
    split_runs: SplitRuns
    feed: Feed
    remove_device: Callable[[str], None]
    add_supernode: Callable[..., None]
    check_run: Callable[[RunConfig], Json]
    plan_run: Callable[[RunConfig], Json]
    render_metrics: Callable[[], bytes]
