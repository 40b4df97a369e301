"""A coordinator's front door for tests: real TLS, real store, the enrolment routes and two guarded ones."""

from __future__ import annotations

import base64
import gc
import os
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import Depends, FastAPI, Request
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from requirements import FOLDERS
from sqlalchemy import Connection, inspect

from edgefl.coordinator.api.access import Authenticator
from edgefl.coordinator.auth import register_error_handler, require_device
from edgefl.coordinator.directory import CoordinatorDirectory, init_directory
from edgefl.coordinator.enrolment.enrolment_service import EnrolmentService, enrolment_router
from edgefl.coordinator.enrolment.tokens import make_token
from edgefl.core.errors import NetworkError, NotAllowedError, NotFoundError
from edgefl.core.extensions import ALLOW_VARIABLE
from edgefl.core.protocol import JoinToken
from edgefl.storage import database
from edgefl.storage.store import Store

LONGEST = Path(__file__).parent / "test_examples.py"


def pytest_configure() -> None:
    """Lets tests start what `requirements` finds in folders to which only root's PATH leads."""
    os.environ["PATH"] = os.pathsep.join(FOLDERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the file that takes longest, so that no other worker waits for its end."""
    items.sort(key=lambda item: item.path != LONGEST)


def pytest_collection_finish() -> None:
    """Takes thousands of collected tests out of every later garbage collection: Flower asks for many."""
    gc.collect()
    gc.freeze()


class FrontDoor:
    """Serves on a free port of loopback; notes what it was asked, and can lose an answer on purpose."""

    def __init__(
        self,
        root: Path,
        *,
        fleet: str = "lab",
        clock: Callable[[], float] = time.time,
        shown_ca: bytes | None = None,
        server: tuple[Path, Path] | None = None,
        grant: Callable[[CoordinatorDirectory], tuple[CoordinatorDirectory, Path | None]] | None = None,
    ) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.directory: CoordinatorDirectory = init_directory(root, hosts=["127.0.0.1"], fleet=fleet, port=self.port)
        if grant:
            self.directory, _ = grant(self.directory)
        if shown_ca:
            self.directory.ca_cert.write_bytes(shown_ca)
        self._certificate, self._key = server or (self.directory.server_cert, self.directory.server_key)
        self.store = Store.open(self.directory.database)
        self.requests: list[str] = []
        self.enrolled: list[tuple[str, bytes]] = []
        self.lose_answers = 0
        self.clock = clock
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def token(self, **terms: Any) -> JoinToken:
        return make_token(self.store, self.directory, now=self.clock(), **terms)

    def start(self) -> None:
        config = uvicorn.Config(
            self._app(),
            ssl_certfile=self._certificate,
            ssl_keyfile=self._key,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",  # its library warns at import, and we have no use for it
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        if self._server and self._thread:
            self._server.should_exit = True
            self._thread.join(60)
        self._socket.close()
        self.store.close()

    def forget(self) -> None:
        """Makes it as good as new: it knows no device and was asked nothing."""
        for device in self.store.list_devices():
            self.store.remove_device(device.device_id, at=self.clock())
        self.requests.clear()
        self.enrolled.clear()
        self.lose_answers = 0

    def _signed_by(self, request: Request) -> str:
        """Returns whose key a request shows; the signature itself is the affair of other tests."""
        key = base64.b64decode(request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER])
        for each in self.store.list_devices():
            if each.public_key == key:
                return each.device_id
        raise NotAllowedError("no such key")

    def _app(self) -> Any:
        app = FastAPI()
        register_error_handler(app)
        service = EnrolmentService(
            directory=self.directory,
            store=self.store,
            on_enrolled=lambda device_id, key: self.enrolled.append((device_id, key)),
            broker_port=18883,
            clock=self.clock,
        )
        app.include_router(enrolment_router(service))
        auth = Authenticator(self.directory, self.store, listen_host="0.0.0.0")
        viewer = Depends(auth.require_viewer)

        @app.post("/edgefl/v1/renew", dependencies=[Depends(require_device(self._signed_by))])
        def renew() -> None:
            raise NetworkError("malformed renewal: csr must be a text")

        @app.get("/edgefl/v1/seen", dependencies=[viewer])
        def seen(word: str = "") -> dict[str, Any]:
            return {"v": 1, "word": word}

        @app.get("/edgefl/v1/missing", dependencies=[viewer])
        def missing() -> None:
            raise NotFoundError("no run 'x'")

        @app.post("/edgefl/v1/done", dependencies=[Depends(auth.require_operator)])
        def done(body: dict[str, Any]) -> dict[str, Any]:
            return {"v": 1, "did": body["what"]}

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            self.requests.append(f"{scope['method']} {scope['path']}")
            if scope["path"].endswith("/enroll") and self.lose_answers:
                self.lose_answers -= 1

                async def lose(_message: Any) -> None:
                    return None

                await app(scope, receive, lose)
                return
            await app(scope, receive, send)

        return noting


@pytest.fixture(scope="session", autouse=True)
def migrate_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gives every new store of this process what the migrations made of its first one, which takes them 70 ms."""
    migrate, first = database._upgrade, tmp_path_factory.mktemp("store") / "first.db"
    Store.open(first).close()
    with closing(sqlite3.connect(first)) as made:
        script = [line for line in made.iterdump() if line not in {"BEGIN TRANSACTION;", "COMMIT;"}]

    def upgrade(connection: Connection) -> None:
        if connection.dialect.name != "sqlite" or inspect(connection).get_table_names():
            migrate(connection)
            return
        for statement in script:
            connection.exec_driver_sql(statement)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(database, "_upgrade", upgrade)
        yield


@pytest.fixture
def front_door(tmp_path: Path) -> Iterator[FrontDoor]:
    door = FrontDoor(tmp_path / "coordinator")
    door.start()
    yield door
    door.stop()


@pytest.fixture(scope="module")
def module_front_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    """For all tests of a module; see `FrontDoor.forget`."""
    door = FrontDoor(tmp_path_factory.mktemp("door") / "coordinator")
    door.start()
    yield door
    door.stop()


@pytest.fixture
def make_front_door(tmp_path: Path) -> Iterator[Callable[..., FrontDoor]]:
    doors: list[FrontDoor] = []

    def make(**options: Any) -> FrontDoor:
        doors.append(FrontDoor(tmp_path / f"coordinator-{len(doors)}", **options))
        doors[-1].start()
        return doors[-1]

    yield make
    for door in doors:
        door.stop()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Installs a package for one test: modules by name, entry points by group; returns the folder it lies in.

    Run files may name its modules.
    """
    folder, names = tmp_path / "installed", set[str]()
    info = folder / "installed-1.0.dist-info"

    def install(modules: Mapping[str, str], points: Mapping[str, Mapping[str, str]] | None = None) -> Path:
        info.mkdir(parents=True, exist_ok=True)
        groups = {group: "".join(f"{k} = {v}\n" for k, v in table.items()) for group, table in (points or {}).items()}
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("".join(f"[{group}]\n{lines}" for group, lines in groups.items()))
        for name, source in modules.items():
            (folder / f"{name}.py").write_text(source)
        names.update(modules)
        monkeypatch.setenv(ALLOW_VARIABLE, ",".join(names))
        monkeypatch.syspath_prepend(folder)
        return folder

    yield install
    for name in names:
        sys.modules.pop(name, None)
