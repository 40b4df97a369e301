"""`edgefl provision ssh`: joins running hosts that hold their data, in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl.cli.provision_options import read_text
from edgefl.cli.render import format_option, print_rows
from edgefl.core.errors import JoinError

if TYPE_CHECKING:
    from edgefl.provision.ssh_provisioning import HostResult

COLUMNS = ("host", "name", "result", "step", "seconds", "note")
MAX_HOSTS_CHARS = 1_000_000
TOKEN_TTL = "1h"  # noqa: S105 a lifetime, no secret
_FILE_TYPE = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.command("ssh")
@click.option(
    "--hosts",
    "hosts_file",
    type=click.File(),
    required=True,
    help="One board a line: [user@]host name=NAME TASK=PATH.",
)
@click.option("--token", "text", envvar="EDGEFL_JOIN_TOKEN", help="A token for all [default: one is made for each].")
@click.option("--url", metavar="URL", help="The coordinator that makes the tokens [default: operator.toml's].")
@click.option("--wheels", type=click.Path(path_type=Path, file_okay=False), help="edgefl's wheel, or all wheels.")
@click.option("--lock", type=_FILE_TYPE, help="A hash-pinned requirements file [default: each board's].")
@click.option(
    "--signer", "signers", multiple=True, type=_FILE_TYPE, help="Public key whose releases it runs; repeat."
)
@click.option("--jobs", type=click.IntRange(1, 256), default=8, show_default=True, help="How many boards at a time.")
@click.option(
    "--become", type=click.Choice(["sudo", "doas", "none"]), default="sudo", show_default=True, help="Who makes root."
)
@click.option(
    "--wait", "wait_s", type=click.IntRange(1, 86400), default=300, show_default=True, help="Seconds to join."
)
@click.option("--ssh-config", type=_FILE_TYPE, help="Another ssh_config than your own.")
@click.option("--dry-run", "is_dry", is_flag=True, help="Only look at the boards.")
@format_option
def ssh(  # noqa: PLR0913 one argument per option
    *,
    hosts_file: Any,
    text: str | None,
    url: str | None,
    wheels: Path | None,
    lock: Path | None,
    signers: tuple[Path, ...],
    jobs: int,
    become: str,
    wait_s: int,
    ssh_config: Path | None,
    is_dry: bool,
    fmt: str,
) -> None:
    """Install edgefl on boards that run already, and join them; data stays where it is.

    Whatever is done already is left alone, so the same command again mends what failed.
    """
    from edgefl.provision.hosts_file import parse_hosts  # noqa: PLC0415 fast start
    from edgefl.provision.ssh_provisioning import ProvisionOutcome, SshProvisionOptions, TokenIssuer, provision_hosts  # noqa: PLC0415 likewise

    hosts = parse_hosts(read_text(hosts_file, "the hosts file", max_chars=MAX_HOSTS_CHARS))
    fingerprint, make = _make_token_source(text, url)
    extra, version, is_offline = _load_extras(wheels, lock, signers)
    options = SshProvisionOptions(
        version=version,
        ca_fingerprint=fingerprint,
        issue_token=TokenIssuer(make),
        clock=time.monotonic,
        now=time.time,
        extra_files=extra,
        is_offline=is_offline,
        become="" if become == "none" else become,
        wait_s=wait_s,
        is_dry_run=is_dry,
        ssh_options=["-F", str(ssh_config)] if ssh_config else [],
        on_step=lambda host, step: click.echo(f"{host.name}: {step}", err=True),
    )
    results = provision_hosts(hosts, options, jobs=jobs)
    print_rows([_make_row(result) for result in results], COLUMNS, fmt, kind="boards")
    if failed := [result.host.name for result in results if result.outcome is ProvisionOutcome.FAILED]:
        raise JoinError(f"{len(failed)} of {len(hosts)} boards did not get through: {', '.join(failed)}")


def _make_row(result: HostResult) -> dict[str, Any]:
    return {
        "host": result.host.label,
        "name": result.host.name,
        "result": str(result.outcome),
        "step": str(result.step),
        "seconds": round(result.seconds, 1),
        "note": result.text,
    }


def _make_token_source(text: str | None, url: str | None) -> tuple[str, Callable[[str], str]]:
    """Returns the fleet's fingerprint, and a token issuer for a role."""
    from edgefl.core.protocol import JoinToken  # noqa: PLC0415 likewise
    from edgefl.system.api_client import CoordinatorClient, find_operator_file  # noqa: PLC0415 fast start

    if text is not None:
        return JoinToken.parse(text).ca_fingerprint, lambda _role: text
    operator = CoordinatorClient.from_options(url)

    def make(role: str) -> str:
        answer = operator.post("/edgefl/v1/tokens", {"ttl": TOKEN_TTL, "uses": 1, "role": role})
        return JoinToken.parse(str(answer["token"])).text()

    return find_operator_file(operator.url).ca_fingerprint, make


def _load_extras(
    wheels: Path | None, lock: Path | None, signers: tuple[Path, ...]
) -> tuple[Mapping[str, bytes | Path], str, bool]:
    """Returns the payload's extra files, its version of edgefl, and whether it needs no index."""
    from edgefl.provision import payload_extras  # noqa: PLC0415 fast start

    files: dict[str, bytes | Path] = {
        **payload_extras.load_signers(signers),
        **(payload_extras.load_lock(lock) if lock else {}),
    }
    files |= payload_extras.list_wheels(wheels) if wheels else {}
    version = payload_extras.find_edgefl_version(files)
    num_wheels = sum(name.startswith("wheels/") for name in files)
    return {**files, "version": f"{version}\n".encode()}, version, num_wheels > 1
