"""An S3 server of a test's own (moto): in a thread of this process, on loopback, with one bucket, gone at the end."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

BUCKET = "lab"
REASON = (
    "moto and s3fs are not installed: pip install 'edgefl-fleet[s3]' 'moto[s3]' flask flask-cors -c constraints.txt"
)


class S3Server:
    """A server that runs; `url` is what `AWS_ENDPOINT_URL` names."""

    def __init__(self, url: str) -> None:
        from s3fs import S3FileSystem  # noqa: PLC0415 an extra

        self.url = url
        self.files = S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
        httpx.post(f"{url}/moto-api/reset").raise_for_status()  # what an earlier one of this process had
        self.files.mkdir(BUCKET)

    def read(self, key: str) -> bytes:
        return self.files.cat_file(f"{BUCKET}/{key}")

    def write(self, key: str, content: bytes) -> None:
        self.files.pipe_file(f"{BUCKET}/{key}", content)

    def keys(self) -> list[str]:
        return sorted(name.removeprefix(f"{BUCKET}/") for name in self.files.find(BUCKET))


@contextmanager
def run_s3_server(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[S3Server]:
    """Runs a server, whose address and keys are in the environment; skips the test where moto or s3fs is absent."""
    for module in ("moto", "flask_cors", "s3fs"):
        pytest.importorskip(module, reason=REASON)
    from moto.server import ThreadedMotoServer  # noqa: PLC0415 likewise

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": str(home / "no-config"),
            "AWS_SHARED_CREDENTIALS_FILE": str(home / "no-credentials"),
            "NO_PROXY": "127.0.0.1",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield S3Server(environment["AWS_ENDPOINT_URL"])
    finally:
        server.stop()
