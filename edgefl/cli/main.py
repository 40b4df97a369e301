"""The `edgefl` command: imports a group when it is called, and turns edgefl's errors into one line."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any, NoReturn

import click

from edgefl import __version__
from edgefl.cli.output import FullHelpGroup
from edgefl.core.errors import EXTRAS, EdgeflError, MissingPackageError, format_install_command
from edgefl.core.safe_text import LOG_FORMAT, SafeFormatter, escape_text

COMMANDS = {
    "advise": ("edgefl.cli.advise:command", "Say which settings suit a run and its boards, and what they come to"),
    "alerts": ("edgefl.cli.fleet.alerts:command", "Try whether the coordinator's alerts arrive"),
    "audit": ("edgefl.cli.audit:command", "Try to refute what a run promises: its differential privacy"),
    "codecs": ("edgefl.cli.catalogue:codecs", "List the codecs, measure them on a gradient"),
    "coordinator": (
        "edgefl.cli.fleet.coordinator:command",
        "Set up and run the coordinator, make join tokens, name its users",
    ),
    "base": ("edgefl.cli.fleet.bases:command", "Bring pretrained bases to the coordinator, for boards to fetch once"),
    "completion": ("edgefl.cli.catalogue:completion", "Print what makes a shell complete commands and options"),
    "data": ("edgefl.cli.experiments:data", "Cut a data set into shards for experiments, or compare data"),
    "demo": ("edgefl.cli.experiments:demo", "Run a whole fleet on this machine"),
    "device": ("edgefl.cli.device:command", "On the board itself: join a fleet, run the agent"),
    "devices": (
        "edgefl.cli.fleet.devices:command",
        "On the owner's side: all boards of a fleet, list, drain, update, remove",
    ),
    "doctor": ("edgefl.cli.doctor:command", "Look for problems on this machine, with remedies"),
    "export": ("edgefl.cli.run:export", "Take a run elsewhere: a plain Flower app"),
    "field-report": ("edgefl.cli.doctor:field_report", "Bundle what a real board has to tell, to send it back"),
    "flower": ("edgefl.cli.flower:command", "Bring a Flower app to the boards as it is"),
    "fleet": ("edgefl.cli.fleet.fleets:command", "Choose the fleet that commands go to, where there are several"),
    "gateway": ("edgefl.cli.fleet.gateway:command", "At a site: take its boards, be one device for the coordinator"),
    "history": ("edgefl.cli.history:command", "Ask what happened: rounds, updates, devices, heartbeats, events"),
    "model": (
        "edgefl.cli.fleet.models:command",
        "List, export and evaluate the models that runs have kept; deploy them",
    ),
    "provision": (
        "edgefl.cli.provision.commands:command",
        "Make boards into devices: cards, images, hosts that run already",
    ),
    "quickstart": ("edgefl.cli.catalogue:quickstart", "Answer five questions, get a run file and the next commands"),
    "run": ("edgefl.cli.run:command", "Submit, watch, stop and resume training runs"),
    "signing": ("edgefl.cli.signing:command", "Sign releases and task packs for the boards"),
    "simulate": ("edgefl.cli.experiments:simulate", "Run on a virtual fleet, in virtual time"),
    "sweep": ("edgefl.cli.sweep:command", "Simulate with every combination of settings and seeds, and compare"),
    "task": ("edgefl.cli.starters.task:command", "Begin a task of your own, or compile one"),
    "stats": ("edgefl.cli.stats:command", "Ask the boards for figures of their data, without any example"),
    "user": ("edgefl.cli.fleet.users:remote_command", "Name people who may use a coordinator, from afar"),
    "top": ("edgefl.cli.fleet.devices:top", "Watch boards, run and events in this terminal"),
    "strategies": ("edgefl.cli.catalogue:strategies", "List the strategies, begin one of your own"),
}
"""Where each command lies, and its line in the help."""
FIRST_DAY = (
    ("edgefl coordinator init", "Make a fleet on this machine; then run it: edgefl coordinator start"),
    ("edgefl coordinator token", "Print the line that lets a board join"),
    ("edgefl device join ...", "That line, on the board; then: edgefl device start"),
    ("edgefl run submit run.toml --watch", "Train; `edgefl quickstart` writes the file"),
)
THEMES = {
    "Begin": ("quickstart", "demo", "doctor"),
    "Your fleet, from your machine": (
        "alerts",
        "coordinator",
        "devices",
        "fleet",
        "gateway",
        "provision",
        "signing",
        "top",
        "user",
    ),
    "On a board": ("device", "field-report"),
    "Train": (
        "run",
        "simulate",
        "sweep",
        "advise",
        "audit",
        "task",
        "strategies",
        "codecs",
        "data",
        "base",
        "flower",
    ),
    "Results": ("history", "model", "stats", "export"),
    "Shell": ("completion",),
}
EXAMPLES = {
    "advise run": "advise run run.toml --goal 'accuracy >= 0.9' --measured --write advised.toml",
    "advise privacy": "advise privacy --epsilon 8 --delta 1e-5 --rounds 100 --boards 1000 --sampling 0.1",
    "alerts test": "alerts test",
    "audit privacy": "audit privacy run.toml --devices 20 --canaries 200",
    "base add": "base add mobilenet.safetensors --name mobilenet-v2",
    "base list": "base list",
    "base copy": "base copy mobilenet-v2 /srv/stick",
    "base remove": "base remove mobilenet-v2",
    "codecs bench": "codecs bench --codec 'topk:0.01|int8'",
    "codecs list": "codecs list",
    "completion": "completion bash >> ~/.bashrc",
    "coordinator backup": "coordinator backup fleet.tar.gz",
    "coordinator broker": "coordinator broker --kind mosquitto",
    "coordinator grafana": "coordinator grafana > edgefl.json",
    "coordinator init": "coordinator init --host coordinator.local --fleet lab",
    "coordinator readdress": "coordinator readdress 192.168.1.20",
    "coordinator restore": "coordinator restore fleet.tar.gz",
    "coordinator rotate": "coordinator rotate",
    "coordinator sign": "coordinator sign digits.onnx --kind model --out digits.bundle",
    "coordinator start": "coordinator start --test-shard digits=shards/test.npz",
    "coordinator token": "coordinator token --uses 3 --ttl 2h",
    "coordinator user add": "coordinator user add ada --role operator --expires 30d",
    "coordinator user list": "coordinator user list",
    "coordinator user revoke": "coordinator user revoke ada",
    "data drift": "data drift run.toml --reference june.csv --data july.csv --threshold 0.25",
    "data shard": "data shard digits --devices 3 --out shards",
    "demo": "demo --devices 3",
    "device apply-update": "device apply-update systemctl restart edgefl-device",
    "device collect": "device collect /etc/edgefl/collect.toml",
    "device infer": "device infer --input rows.csv",
    "device join": "device join coordinator.local:8000 --token-file token --shard digits=device-01.npz",
    "device pause": "device pause 2h",
    "device probe": "device probe --json",
    "device resume": "device resume",
    "device serve": "device serve --port 8080",
    "device label": "device label /var/lib/edgefl-collect/birds --label robin --label wren --model deployed",
    "device set": "device set --max-temperature 75",
    "device shard add": "device shard add digits /home/pi/device-01.npz",
    "device shard check": "device shard check",
    "device shard export": "device shard export pictures tasks --label robin --label wren",
    "device shard forget": "device shard forget series --since 2026-03-01T14:00 --until 2026-03-01T15:00",
    "device shard guess": "device shard guess pictures --model deployed",
    "device shard import": "device shard import pictures project-1.json --label robin --label wren",
    "device shard remove": "device shard remove digits",
    "device shard show": "device shard show series",
    "device shard stats": "device shard stats series",
    "device start": "device start",
    "device status": "device status",
    "device trust": "device trust release.pem",
    "devices drain": "devices drain pi-07",
    "devices install": "devices install greenhouse.bundle --canary 1",
    "devices list": "devices list",
    "devices logs": "devices logs pi-07 --since 2h",
    "devices remove": "devices remove pi-07",
    "devices resume": "devices resume pi-07",
    "devices show": "devices show pi-07",
    "devices signers": "devices signers signers.bundle",
    "devices uninstall": "devices uninstall greenhouse-removal.bundle",
    "devices update": "devices update --to 0.3.0 --bundle edgefl-0.3.0.bundle --canary 2",
    "devices updates": "devices updates",
    "doctor": "doctor",
    "export flower-app": "export flower-app run.toml --out app",
    "field-report": "field-report --out report.zip",
    "flower add-node": "flower add-node server-room node.pub --app quickstart-numpy",
    "flower check": "flower check quickstart-numpy",
    "flower demo": "flower demo quickstart-numpy --devices 3",
    "flower pack": "flower pack quickstart-numpy",
    "fleet list": "fleet list",
    "fleet remove": "fleet remove old-lab",
    "fleet use": "fleet use lab",
    "gateway start": "gateway start --upstream coordinator.local:8000 --token-file token --name site-1",
    "gateway token": "gateway token --uses 20",
    "history accuracy": "history accuracy --run latest",
    "history advice": "history advice",
    "history audit": "history audit --since 1d",
    "history devices": "history devices --run latest",
    "history dropouts": "history dropouts --since 7d",
    "history energy": "history energy --run latest",
    "history evaluations": "history evaluations --run latest --limit 20",
    "history events": "history events --since 1h",
    "history export": "history export out --run latest",
    "history heartbeats": "history heartbeats --device pi-07 --since 1h",
    "history plot": "history plot --run latest --out run.png",
    "history rounds": "history rounds --run latest --format csv",
    "history runs": "history runs",
    "history slow": "history slow --run latest",
    "history stale": "history stale --run latest",
    "history track": "history track --mlflow http://127.0.0.1:5000 --run latest --follow",
    "history traffic": "history traffic --since 7d",
    "history updates": "history updates --run latest --device pi-07",
    "history uses": "history uses pi-07 --since 2026-03-01",
    "history why": "history why latest 7",
    "model deploy": "model deploy best --canary 1",
    "model deployments": "model deployments",
    "model evaluate": "model evaluate latest --shard shards/test.npz",
    "model export": "model export best --out model.onnx",
    "model list": "model list",
    "model register": "model register best --mlflow http://127.0.0.1:5000 --name digits --alias champion",
    "model show": "model show latest",
    "provision jetson": "provision jetson --name orin-01 --out card",
    "provision raspberry-pi": "provision raspberry-pi --boot /media/bootfs --name pi-01",
    "provision setup": "provision setup --wheels wheels",
    "provision ssh": "provision ssh --hosts boards.txt --wheels wheels --dry-run",
    "provision systemd": "provision systemd --device --install",
    "provision wheels": "provision wheels --board pi-trixie --out wheels",
    "quickstart": "quickstart --data digits --boards 3 --goal 0.95 --out run.toml",
    "run flower-app": "run flower-app quickstart-numpy --run-config 'num-server-rounds=5' --watch",
    "run forget": "run forget latest --device pi-07",
    "run list": "run list",
    "run result": "run result latest --out product.npy",
    "run resume": "run resume latest",
    "run schema": "run schema > run.schema.json",
    "run show": "run show latest",
    "run stop": "run stop latest",
    "run submit": "run submit run.toml --watch",
    "run watch": "run watch latest",
    "signing cosign": "signing cosign signers.json",
    "signing init": "signing init --keys ~/edgefl-keys",
    "signing show": "signing show greenhouse.bundle",
    "signing sign": "signing sign edgefl_fleet-0.3.0-py3-any.whl --kind release --version 0.3.0 --out new.bundle",
    "signing signers": "signing signers new.pem --threshold 1",
    "simulate": "simulate run.toml --devices 100 --profile pi-4:60 --profile pi-zero-2w:40",
    "stats": "stats digits --columns 0-9 --min-group 10",
    "strategies list": "strategies list",
    "strategies new": "strategies new trimmed",
    "sweep": "sweep run.toml --set strategy.learning_rate=0.01,0.1 --seeds 5",
    "task compile": "task compile mnist --batch-size 10 --out compiled",
    "task new": "task new harvest --kind tabular",
    "top": "top",
    "user add": "user add ada --role viewer",
    "user list": "user list",
    "user revoke": "user revoke ada",
}
"""An example of every command, without `edgefl`."""


class LazyGroup(FullHelpGroup):
    """Command group that imports its commands' modules on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 click's interface
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 click's
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        _add_examples(command, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 click's
        with formatter.section("The first day"):
            formatter.write_dl(FIRST_DAY)
        for theme, names in THEMES.items():
            with formatter.section(theme):
                formatter.write_dl([(name, COMMANDS[name][1]) for name in names])


def _add_examples(command: click.Command, path: str) -> None:
    """Adds its example to the help of a command, and to those below it."""
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            _add_examples(below, f"{path} {name}")
    elif path in EXAMPLES:
        command.epilog = f"\b\nExample:\n  edgefl {EXAMPLES[path]}"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edgefl")
@click.option("-v", "--verbose", count=True, help="Say more on stderr; twice for debugging.")
@click.option("-q", "--quiet", is_flag=True, help="Only warnings and errors on stderr.")
def edgefl(*, verbose: int, quiet: bool) -> None:
    """Federated learning for fleets of Raspberry Pi, Jetson and other Linux boards."""
    level = logging.WARNING if quiet else (logging.INFO if verbose < 2 else logging.DEBUG)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SafeFormatter(LOG_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
    for noisy in ("httpx", "httpcore", "alembic", "fontTools", "matplotlib", "PIL"):
        logging.getLogger(noisy).setLevel(logging.WARNING if verbose < 2 else logging.DEBUG)
    for secretive in ("aiobotocore", "botocore", "fsspec", "s3fs"):  # they log requests with what signs them
        logging.getLogger(secretive).setLevel(logging.WARNING)


def main(arguments: list[str] | None = None) -> Any:
    """Runs one command; an `EdgeflError` becomes a line on stderr and its exit code.

    A bug keeps its traceback.
    """
    try:
        return edgefl.main(args=arguments, prog_name="edgefl", standalone_mode=True)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        _exit_with_error(
            MissingPackageError(
                f"this command needs {module}, which is not installed: {format_install_command(module)}"
            )
        )
    except EdgeflError as error:
        _exit_with_error(error)


def _exit_with_error(error: EdgeflError) -> NoReturn:
    click.echo(f"edgefl: {escape_text(' '.join(str(error).split()))}", err=True)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
