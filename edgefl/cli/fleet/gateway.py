"""`edgefl gateway`: a coordinator for the boards of a site, which is one device for the coordinator upstream."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from edgefl.cli.device_join import MAX_TOKEN_CHARS, parse_join_address
from edgefl.cli.fleet.coordinator import DEFAULT_HOST, grant_access
from edgefl.cli.fleet.coordinator import token as make_site_token
from edgefl.cli.output import FullHelpGroup, make_broker_option, text_format_option
from edgefl.cli.signing import signers_option
from edgefl.cli.sources import FOLDER_TYPE, allow_module_option, warn_visible_secret
from edgefl.core.errors import EdgeflError, UsageError
from edgefl.core.protocol import JoinToken

if TYPE_CHECKING:
    from edgefl.coordinator.directory import CoordinatorDirectory
    from edgefl.coordinator.execution.site_outage import OutageLimits
    from edgefl.coordinator.service import Coordinator
    from edgefl.device.state_dir import DeviceStateDir
    from edgefl.device.updates.slots import SoftwareUpdateConfig

SITE_FOLDER, UPSTREAM_FOLDER = "site", "upstream"
"""In a gateway's directory: that of the site's coordinator, and the state of the device that it is upstream."""
MAX_OUTAGE_ROUNDS = 100_000


def _get_default_dir() -> Path:
    from edgefl.coordinator.directory import default_directory  # noqa: PLC0415 fast start

    return default_directory().with_name("gateway")


gateway_option = click.option(
    "--dir", "root", type=FOLDER_TYPE, help="Directory of the gateway [default: ~/.local/share/edgefl/gateway]."
)


@click.group(cls=FullHelpGroup)
def command() -> None:
    """Run a site gateway: boards join it as they join a coordinator, and upstream it is one device.

    Runs are submitted upstream: `edgefl run` goes there. `edgefl devices` with the site's operator file shows the
    boards of the site.
    """


@command.command()
@gateway_option
@click.option("--upstream", metavar="HOST:PORT", help="The coordinator [default: the addresses in the token].")
@click.option(
    "--token",
    "text",
    envvar="EDGEFL_JOIN_TOKEN",
    callback=warn_visible_secret,
    help="What `edgefl coordinator token` printed upstream; needed at the first start, better in the variable.",
)
@click.option("--token-file", type=click.File(), help="A file with the token in it; - is the standard input.")
@click.option("--name", help="The gateway's name upstream, and its fleet's [default: the host's].")
@click.option("--site-host", "hosts", multiple=True, metavar="NAME", help="A name or address for the site's boards.")
@click.option("--host", default=DEFAULT_HOST, show_default=True, help="Address to listen on for the site's boards.")
@click.option("--port", type=click.IntRange(1, 65535), help="HTTPS port for them [default: 8000, then as before].")
@make_broker_option("--broker")
@click.option("--broker-port", type=click.IntRange(1, 65535), default=8883, show_default=True, help="MQTT over TLS.")
@click.option(
    "--outage-rounds",
    type=click.IntRange(0, MAX_OUTAGE_ROUNDS),
    default=0,
    show_default=True,
    help="Rounds of the site's own while the uplink is away; the next answer takes along what they make.",
)
@click.option(
    "--max-staleness",
    type=click.IntRange(0, MAX_OUTAGE_ROUNDS),
    help="Versions of the model that may have come meanwhile; later what they make is dropped "
    "[default: four times --outage-rounds, at least 50].",
)
@signers_option
@click.option(
    "--confine",
    type=click.Choice(["auto", "never"]),
    envvar="EDGEFL_CONFINE",
    help="never loads tasks that are not built in, to know their model; auto refuses such runs [default: as before].",
)
@allow_module_option
def start(  # noqa: PLR0913, PLR0917 one argument per option
    root: Path | None,
    upstream: str | None,
    text: str | None,
    token_file: TextIO | None,
    name: str | None,
    hosts: tuple[str, ...],
    host: str,
    port: int | None,
    broker: str,
    broker_port: int,
    outage_rounds: int,
    max_staleness: int | None,
    signers: Path,
    confine: str | None,
) -> None:
    """Run the gateway until SIGTERM or Ctrl-C; at the first start it joins the coordinator upstream."""
    from edgefl.coordinator.directory import StartOptions, init_directory  # noqa: PLC0415 fast start
    from edgefl.coordinator.execution.site_outage import OutageLimits  # noqa: PLC0415 likewise
    from edgefl.coordinator.service import Coordinator  # noqa: PLC0415 likewise
    from edgefl.device.updates.slots import load_update_config  # noqa: PLC0415 likewise
    from edgefl.engine.assembly.build import build_run  # noqa: PLC0415 likewise

    root = root or _get_default_dir()
    if token_file is not None:
        text = token_file.read(MAX_TOKEN_CHARS)
    state = join_upstream(root / UPSTREAM_FOLDER, upstream=upstream, text=text, name=name)
    site_root = root / SITE_FOLDER
    is_new = not (site_root / "settings.toml").exists()
    directory = init_directory(site_root, hosts=hosts, fleet=state.device_id if is_new else None, port=port)
    directory, _ = grant_access(directory)
    click.echo(
        f"{state.device_id} is a device of fleet {state.settings.fleet}; boards of the site join at "
        f"{', '.join(directory.addresses)} (edgefl gateway token)"
    )
    options = StartOptions(host=host, port=directory.port, broker=broker, broker_port=broker_port)
    coordinator = Coordinator(directory, options, partial(build_run, bases=directory.bases))
    with state.lock():
        if confine is not None:
            state.update(confine=confine)
        max_staleness = max(50, 4 * outage_rounds) if max_staleness is None else max_staleness
        outage = OutageLimits(max_rounds=outage_rounds, max_staleness=max_staleness)
        run_gateway(coordinator, directory, state, load_update_config(signers), outage)


@command.command()
@gateway_option
@click.option("--ttl", default="24h", show_default=True, help="How long it lets in: 30m, 24h, 7d.")
@click.option("--uses", type=int, default=1, show_default=True, help="How many boards it lets in.")
@click.option("--group", "groups", multiple=True, help="Put the boards into this group; may be repeated.")
@text_format_option
@click.pass_context
def token(
    context: click.Context, root: Path | None, ttl: str, uses: int, groups: tuple[str, ...], style: str
) -> None:
    """Print a token that lets boards of the site join; `edgefl device join` takes it as any other."""
    site = (root or _get_default_dir()) / SITE_FOLDER
    context.invoke(make_site_token, root=site, ttl=ttl, uses=uses, groups=groups, role="trainer", style=style)


def join_upstream(root: Path, *, upstream: str | None, text: str | None, name: str | None) -> DeviceStateDir:
    """Returns the state of the gateway's device, joined with a token unless it has joined before.

    Raises:
        UsageError: it has not joined, and there is no token.
        EdgeflError: the join fails.
    """
    from edgefl.device.enrolment.enroll import EnrolmentOptions, enroll, get_host_slug  # noqa: PLC0415 fast start
    from edgefl.device.hardware.capabilities import probe  # noqa: PLC0415 likewise
    from edgefl.device.state_dir import DeviceStateDir  # noqa: PLC0415 likewise

    if (root / "device.json").exists() and text is None:
        return DeviceStateDir.load(root)
    if text is None:
        raise UsageError(
            "a gateway joins the coordinator upstream at its first start: --upstream HOST:PORT with --token-file "
            "FILE or EDGEFL_JOIN_TOKEN; `edgefl coordinator token`, upstream, makes one"
        )
    join_token = JoinToken.parse(text)
    first = (parse_join_address(upstream),) if upstream else ()
    join_token = replace(join_token, addresses=tuple(dict.fromkeys([*first, *join_token.addresses])))
    return enroll(join_token, EnrolmentOptions(name=name or get_host_slug(), facts=probe()), root=root)


def run_gateway(
    coordinator: Coordinator,
    directory: CoordinatorDirectory,
    state: DeviceStateDir,
    update_config: SoftwareUpdateConfig,
    outage: OutageLimits,
) -> None:
    """Runs the site's coordinator and the device upstream until SIGTERM or SIGINT.

    Raises:
        EdgeflError: either could not start, or cannot go on.
    """
    from edgefl.device.agent import run_agent  # noqa: PLC0415 fast start
    from edgefl.device.training.site_trainer import SiteConnection  # noqa: PLC0415 likewise
    from edgefl.system.processes import raise_file_limit  # noqa: PLC0415 likewise

    errors: list[EdgeflError] = []

    def watch() -> None:
        try:
            coordinator.wait()
        except EdgeflError as error:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    raise_file_limit()
    with coordinator:
        thread = threading.Thread(target=watch, name="site", daemon=True)
        thread.start()
        try:
            site = SiteConnection(site=coordinator.open_site(outage), bases_dir=directory.bases)
            run_agent(state, update_config, site=site)
        finally:
            coordinator.stop()
            thread.join()
    if errors:
        raise errors[0]
