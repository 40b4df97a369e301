"""A PostgreSQL server of a test's own: in a folder of its own, on loopback, gone at the end.

Debian keeps the programs out of PATH, one folder a version; `EDGEFL_POSTGRES` names another folder that has them.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from requirements import require

from edgefl.simulation.local_fleet import find_free_port

PASSWORD = "a quiet p@ss:word/%"


class PostgresServer:
    """A running server; every database in it belongs to the user `edgefl`, who needs a password."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder, self.port = programs, folder, find_free_port()
        self._account = _account()
        self._count = 0

    def start(self) -> None:
        self._folder.chmod(0o700)
        if self._account is not None:
            shutil.chown(self._folder, self._account)
        secret = self._folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        self._run(
            "initdb",
            "-D",
            self._data,
            "-U",
            "edgefl",
            "-A",
            "scram-sha-256",
            f"--pwfile={secret}",
            "-N",
            "-E",
            "UTF8",
        )
        options = f"-c listen_addresses=127.0.0.1 -p {self.port} -k {self._folder} -c fsync=off"
        self._run("pg_ctl", "-D", self._data, "-l", self._folder / "log", "-w", "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "stop")

    def restart(self) -> None:
        """As after a crash of the server: connections break, what was committed stays."""
        self._run("pg_ctl", "-D", self._data, "-l", self._folder / "log", "-m", "immediate", "-w", "restart")

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def new_database(self, *, like: str = "template1") -> str:
        """Returns the name of a new database, a copy of one that nobody has open: an empty one."""
        self._count += 1
        name = f"fleet{self._count}"
        environment = {**os.environ, "PGPASSWORD": PASSWORD}
        command = [
            self._programs / "createdb",
            "-h",
            "127.0.0.1",
            "-p",
            str(self.port),
            "-U",
            "edgefl",
            "-T",
            like,
            name,
        ]
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
        return name

    def url(self, name: str, *, password: bool = True) -> str:
        from sqlalchemy import URL  # noqa: PLC0415 a test without a server needs no SQLAlchemy

        secret = PASSWORD if password else None
        made = URL.create("postgresql", "edgefl", secret, "127.0.0.1", self.port, name)
        return made.render_as_string(hide_password=False)

    def pass_line(self) -> str:
        """Returns the line of a PGPASSFILE for this server."""
        return f"127.0.0.1:{self.port}:*:edgefl:{PASSWORD.replace(':', chr(92) + ':')}\n"

    def _run(self, program: str, *arguments: str | Path) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments],
            user=self._account, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, f"{program} ended with {done.returncode}; see {self._folder}"


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Gives a server, or skips the test where PostgreSQL or its driver is not installed."""
    require("postgresql")
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install -e '.[postgres]' -c constraints.txt")
    programs = _programs()
    assert programs is not None
    # The server's own account must reach it, which pytest's folders do not allow.
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as folder:
        server = PostgresServer(programs, Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _programs() -> Path | None:
    named = os.environ.get("EDGEFL_POSTGRES")
    folders = [Path(named)] if named else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").is_file()), None)


def _account() -> str | None:
    """Returns the account that the server runs under when we are root, as which it refuses to run."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    pytest.skip(f"PostgreSQL does not run as {getpass.getuser()}: make test-all as a user, or adduser postgres")
