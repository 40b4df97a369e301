"""A coordinator with site gateways, each with boards of its own: every one a process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet, find_free_port
from edgefl.system.api_client import CoordinatorClient, load_operator_file

TIMEOUT_S = 300.0
"""Two gateways and their boards start at the same time, on machines with few cores."""


@dataclass(slots=True, kw_only=True)
class SiteGateway:
    """One gateway; `boards` join it, `upstream` is its coordinator's port, `options` are those of its command."""

    fleet: LocalFleet
    name: str
    boards: Sequence[LocalDeviceSpec]
    upstream: int
    options: Sequence[str] = ()
    port: int = field(default_factory=find_free_port)
    broker_port: int = field(default_factory=find_free_port)

    @property
    def root(self) -> Path:
        return self.fleet.root / self.name

    @property
    def variables(self) -> dict[str, str]:
        return {"XDG_CONFIG_HOME": str(self.root / "config")}

    def start(self, token: str = "") -> None:
        with (self.fleet.root / f"{self.name}.log").open("ab") as output:
            self.fleet.processes[self.name] = self.fleet.start_command(
                [
                    "gateway", "start", "--dir", str(self.root), "--upstream", f"127.0.0.1:{self.upstream}",
                    "--name", self.name, "--host", "127.0.0.1", "--site-host", "127.0.0.1", "--port", str(self.port),
                    "--broker", "embedded", "--broker-port", str(self.broker_port),
                    *self.options,
                ],
                stdout=output.fileno(),
                variables={**self.variables, **({"EDGEFL_JOIN_TOKEN": token} if token else {})},
            )  # fmt: skip

    def client(self) -> CoordinatorClient:
        """A client of the site's own API."""
        operator = load_operator_file(self.root / "config" / "edgefl" / "operator.toml")
        url = f"https://127.0.0.1:{self.port}"
        return CoordinatorClient(url=url, ca_pem=operator.ca_pem, token=operator.operator_token)

    def join_boards(self) -> None:
        text = self._type("gateway", "token", "--dir", str(self.root), "--uses", "9", "--format", "json")
        token, joins = json.loads(text)["token"], []
        for board in self.boards:
            shards = [word for task, path in board.shards.items() for word in ("--shard", f"{task}={path}")]
            where = ["device", "join", f"127.0.0.1:{self.port}", "--name", board.name, "--threads", "1"]
            words = [*where, "--state", str(self.fleet.root / board.name), *shards]
            joins.append(self._start(*words, EDGEFL_JOIN_TOKEN=token))
        for board, join in zip(self.boards, joins, strict=True):
            _read(join)
            self.fleet.start_device(board.name)

    def _start(self, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        return self.fleet.start_command(words, variables={**self.variables, **variables})

    def _type(self, *words: str) -> str:
        return _read(self._start(*words)).strip().splitlines()[-1]

    def is_answering(self) -> bool:
        try:
            return bool(self.client().get("/healthz").get("status") == "ok")
        except Exception:  # noqa: BLE001 not yet
            return False

    def has_boards(self) -> bool:
        rows = self.client().get("/edgefl/v1/devices")["rows"]
        return [row["presence"] for row in rows].count("online") == len(self.boards)


def _read(process: subprocess.Popen[bytes]) -> str:
    text = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 0, text
    return text


@dataclass(slots=True, kw_only=True)
class SiteFleet(LocalFleet):
    """`sites` are the boards by gateway; `uplinks` the ports by gateway of what leads it to the coordinator."""

    devices: Sequence[LocalDeviceSpec] = ()
    sites: Mapping[str, Sequence[LocalDeviceSpec]] = field(default_factory=dict)
    uplinks: Mapping[str, int] = field(default_factory=dict)
    options: Sequence[str] = ()
    gateways: dict[str, SiteGateway] = field(default_factory=dict)

    def __enter__(self) -> Self:
        LocalFleet.__enter__(self)
        try:
            for name, boards in self.sites.items():
                self.add_gateway(name, boards)
            for gateway in self.gateways.values():
                self._wait_until(gateway.is_answering, f"gateway {gateway.name} to answer", TIMEOUT_S)
                gateway.join_boards()
                self._wait_until(gateway.has_boards, f"the boards of {gateway.name}", TIMEOUT_S)
            self.wait_for_sites()
        except BaseException:
            self.stop()
            raise
        return self

    def add_gateway(self, name: str, boards: Sequence[LocalDeviceSpec]) -> None:
        token = self.make_client().post("/edgefl/v1/tokens", {"uses": 1, "role": "trainer"})["token"]
        upstream = self.uplinks.get(name, self.port)
        self.gateways[name] = SiteGateway(
            fleet=self, name=name, boards=boards, upstream=upstream, options=self.options
        )
        self.gateways[name].start(token)

    def wait_for_sites(self) -> None:
        """Waits until the coordinator knows of every site's examples."""

        def are_known() -> bool:
            return all(self._read_site(name).get("online") == len(boards) for name, boards in self.sites.items())

        self._wait_until(are_known, "the sites' boards to be known upstream", TIMEOUT_S)

    def _read_site(self, name: str) -> dict[str, int]:
        site: dict[str, int] = self.make_client().get(f"/edgefl/v1/devices/{name}")["capabilities"].get("site", {})
        return site
