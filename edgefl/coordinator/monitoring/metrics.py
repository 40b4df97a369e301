"""`/metrics` in Prometheus' text format: the collector registry, HTTP response counters, and the route.

Nothing here reads history from the store: values come from the device registry, `RunMetrics` and a few `stat` calls.
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
from edgefl.coordinator.auth import AccessCheck
from edgefl.core.types import Json

FLEET_PREFIX = "/v1/fleet/"


class Metrics:
    """Everything that the coordinator exports; `registry` is its own, not the library's global one."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._render_device_series: Callable[[], str] = str
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

    def register(self, collector: Collector, render_device_series: Callable[[], str]) -> None:
        """Adds a collector, and a function that renders more series as text, to each scrape."""
        self.registry.register(collector)
        self._render_device_series = render_device_series

    def render(self) -> bytes:
        """Returns the response to a scrape."""
        return generate_latest(self.registry) + self._render_device_series().encode()

    def count_responses(self, app: ASGIApp) -> ASGIApp:
        """Returns the application with its responses counted."""

        async def count(scope: Scope, receive: Receive, send: Send) -> None:
            api = "fleet" if str(scope.get("path", "")).startswith(FLEET_PREFIX) else "edgefl"

            async def send_counted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._responses.labels(api, str(message["status"])).inc()
                await send(message)

            await app(scope, receive, send_counted)

        return count


def metrics_router(render: Callable[[], bytes], viewer: AccessCheck) -> APIRouter:
    """Returns the route `/metrics`, for viewers."""
    router = APIRouter()

    @router.get("/metrics", dependencies=[Depends(viewer)])
    def metrics() -> Response:
        return Response(render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def load_grafana_dashboard() -> Json:
    """Returns a Grafana dashboard over these metrics, for `Dashboards > Import`."""
    content: Json = json.loads((files("edgefl.coordinator.monitoring") / "grafana.json").read_text(encoding="utf-8"))
    return content
