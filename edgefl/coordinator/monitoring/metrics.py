"""`/metrics` in Prometheus' text format: the registry, what is counted at the front door, and the route.

Nothing here asks the store for history: figures come from the roster, the run meter and a few `stat` calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files

from fastapi import APIRouter, Depends, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgefl import __version__
from edgefl.coordinator.access import Guard
from edgefl.types import Json

FLEET_PATHS = "/v1/fleet/"


class Metrics:
    """Everything that the coordinator exports; `registry` is its own, not the library's global one."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._device_series: Callable[[], str] = str
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        Gauge("edgefl_build_info", "1, with the version of edgefl.", ["version"], registry=self.registry).labels(
            __version__
        ).set(1)
        self._responses = Counter(
            "edgefl_http_responses",
            "Answers over HTTPS: to devices (fleet) and to everybody else (edgefl), by status; 401 is a refusal.",
            ["api", "code"],
            registry=self.registry,
        )

    def watch(self, collector: Collector, device_series: Callable[[], str]) -> None:
        """Exports what these give at each scrape, too; the second is text already."""
        self.registry.register(collector)
        self._device_series = device_series

    def text(self) -> bytes:
        """Returns what a scrape gets."""
        return generate_latest(self.registry) + self._device_series().encode()

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Returns the application with its answers counted."""

        async def count(scope: Scope, receive: Receive, send: Send) -> None:
            api = "fleet" if str(scope.get("path", "")).startswith(FLEET_PATHS) else "edgefl"

            async def note(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._responses.labels(api, str(message["status"])).inc()
                await send(message)

            await app(scope, receive, note)

        return count


def metrics_router(text: Callable[[], bytes], viewer: Guard) -> APIRouter:
    """Returns the route `/metrics`, for those who may read."""
    router = APIRouter()

    @router.get("/metrics", dependencies=[Depends(viewer)])
    def metrics() -> Response:
        return Response(text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def grafana_dashboard() -> Json:
    """Returns a Grafana dashboard over these metrics, for `Dashboards > Import`."""
    content: Json = json.loads((files("edgefl.coordinator.monitoring") / "grafana.json").read_text(encoding="utf-8"))
    return content
