"""The parts of a coordinator that ask devices for something: to train, to answer, to take a model or software."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from edgefl.coordinator.dispatch.outstanding import Bell
from edgefl.coordinator.dispatch.questions import Questions
from edgefl.coordinator.rollouts.bundle_files import BundleFiles
from edgefl.coordinator.rollouts.deployment_files import Export
from edgefl.coordinator.rollouts.deployments import Deployments
from edgefl.coordinator.rollouts.installations import Installations
from edgefl.coordinator.runs.worker import RunSite, RunWorker
from edgefl.errors import EdgeflError


@dataclass(frozen=True, slots=True, kw_only=True)
class Askers:
    """Who asks devices for something; `bell` is how they do it."""

    bell: Bell
    questions: Questions
    deployments: Deployments
    installations: Installations
    worker: RunWorker

    @classmethod
    def at(cls, site: RunSite, *, export: Export, on_fatal: Callable[[EdgeflError], None]) -> Self:
        """Returns those of one coordinator, not yet started.

        Args:
            site: what runs work with; the deployments are told of those that finish.
            export: makes the file of a model that devices deploy.
            on_fatal: called when the store or a journal can no longer be written.
        """
        deployments = Deployments(
            store=site.store,
            roster=site.roster,
            directory=site.directory,
            commander=site.bell,
            export=export,
            on_fatal=on_fatal,
        )
        installations = Installations(
            store=site.store,
            roster=site.roster,
            files=BundleFiles(site.directory.root / "bundles"),
            commander=site.bell,
            on_fatal=on_fatal,
        )
        return cls(
            bell=site.bell,
            questions=Questions(site.bell, site.roster),
            deployments=deployments,
            installations=installations,
            worker=RunWorker(replace(site, on_finished=deployments.after_run), on_fatal=on_fatal),
        )
