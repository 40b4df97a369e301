"""`edgefl provision raspberry-pi`: a card, an image, or the files of many cards."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import click

from edgefl.cli.provision.options import PLACEHOLDER_TOKEN, IssuedToken, ProvisionOptions, board_options, read_text
from edgefl.cli.sources import EXISTING_FILE_TYPE, FOLDER_TYPE
from edgefl.core.errors import UsageError
from edgefl.provision import sd_card
from edgefl.provision.boot_partition import BootFolder, BootImage, open_copy, render_diff
from edgefl.provision.card_files import render_card_files
from edgefl.provision.label_sheet import DeviceLabel, expand_name_pattern, render_sheet
from edgefl.provision.payload import make_payload
from edgefl.provision.provisioning_files import FileContents, ReadFile, count_bytes
from edgefl.provision.sd_card import (
    CardNetwork,
    CardOptions,
    OsFlavour,
    compute_pre_shared_key,
    detect_system,
    validate_static_address,
)
from edgefl.system.atomic_files import write_atomic


@dataclass(frozen=True, slots=True, kw_only=True)
class CardJob:
    """Values common to all cards of one call."""

    options: ProvisionOptions
    card_options: CardOptions
    extra_files: FileContents
    system: str | None
    is_forced: bool

    def make_payload(self, name: str, token: IssuedToken) -> FileContents:
        return make_payload(self.options.make_join_file(name, token.token).to_text(), self.extra_files)

    def render_files(self, name: str, token: IssuedToken, read: ReadFile) -> tuple[FileContents, str]:
        """Returns a card's files, and a description of their system."""
        system: OsFlavour
        if self.system is None:
            system, reason = detect_system(read)
        else:
            system, reason = OsFlavour(self.system), "as --os says"
        # A new identity for each call: cloud-init runs only once under the same name.
        instance = f"edgefl-{name}-{secrets.token_hex(4)}"
        card_options = replace(self.card_options, name=name, instance_id=instance)
        return render_card_files(system, card_options, self.make_payload(name, token), read), f"{system} ({reason})"


@click.command("raspberry-pi")
@board_options
@click.option("--boot", type=FOLDER_TYPE, help="The card's mounted boot partition.")
@click.option(
    "--image", type=EXISTING_FILE_TYPE, help="An image (.img, .img.xz, .img.gz); its copy --out is written, never it."
)
@click.option("--count", type=int, help="So many boards, with a token each; --name is a pattern, --out a folder.")
@click.option("--first", type=click.IntRange(0), default=1, show_default=True, help="The first number of --count.")
@click.option("--out", type=click.Path(path_type=Path), help="The new image, or the folder of many cards.")
@click.option(
    "--os", "system", type=click.Choice(["trixie", "bookworm", "preseed"]), help="What reads it [default: seen]."
)
@click.option("--hostname", help="The board's host name [default: the card's own, else the device's name].")
@click.option("--user", help="Its account, without a password [default: the card's own, else pi].")
@click.option("--ssh-key", type=click.File(), help="Public key of whoever may log in; SSH is on only with one.")
@click.option("--wifi-ssid", help="Its Wi-Fi [default: the card's own, else none].")
@click.option("--wifi-password", envvar="EDGEFL_WIFI_PASSWORD", help="Its password; asked for when it is missing.")
@click.option("--wifi-open", is_flag=True, help="The Wi-Fi has no password.")
@click.option("--wifi-hidden", is_flag=True, help="The Wi-Fi does not show its name.")
@click.option("--wifi-country", metavar="CC", help="Whose rules the radio follows, such as DE; --wifi-ssid needs it.")
@click.option("--ip", metavar="ADDRESS/PREFIX", help="A fixed address, of the Wi-Fi if one is named [default: DHCP].")
@click.option("--gateway", help="The gateway of a fixed address.")
@click.option("--dns", multiple=True, help="A name server of a fixed address [default: the gateway]; repeat.")
@click.option("--interface", default="eth0", show_default=True, help="The wired interface.")
@click.option(
    "--qr",
    type=click.Choice(["page", "join"]),
    default="page",
    show_default=True,
    help="What --count's sheet shows as codes: the boards' pages, or commands with tokens.",
)
@click.option("--dry-run", is_flag=True, help="Show the difference; write nothing, make no token.")
@click.option("--force", is_flag=True, help="Also where this does not look like a Raspberry Pi's boot partition.")
def command(  # noqa: PLR0913, PLR0917 one argument per option
    boot: Path | None,
    image: Path | None,
    count: int | None,
    first: int,
    out: Path | None,
    system: str | None,
    hostname: str | None,
    user: str | None,
    ssh_key: TextIO | None,
    wifi_ssid: str | None,
    wifi_password: str | None,
    wifi_open: bool,
    wifi_hidden: bool,
    wifi_country: str | None,
    ip: str | None,
    gateway: str | None,
    dns: tuple[str, ...],
    interface: str,
    qr: str,
    dry_run: bool,
    force: bool,
) -> None:
    """Put all that a board needs to join by itself onto its card, an image, or the files of many cards.

    Write the card as always, then call this with --boot; no device is ever written, and nothing needs root.
    """
    options = ProvisionOptions.from_context()
    has_password_option = wifi_password is not None and "EDGEFL_WIFI_PASSWORD" not in os.environ
    if wifi_ssid is None and (has_password_option or wifi_open or wifi_hidden or wifi_country):
        raise UsageError("a Wi-Fi needs its name: --wifi-ssid NAME")
    if wifi_ssid is not None and wifi_country is None:
        raise UsageError("a Wi-Fi needs its country, without which the radio stays off: --wifi-country DE")
    network = sd_card.CardNetwork(
        ssid=None if wifi_ssid is None else sd_card.validate_ssid(wifi_ssid),
        psk=None if wifi_ssid is None or wifi_open else _get_pre_shared_key(wifi_ssid, wifi_password),
        country=None if wifi_country is None else sd_card.validate_country(wifi_country),
        is_hidden=wifi_hidden,
        interface=sd_card.validate_interface(interface),
    )
    network = _apply_address(network, ip, gateway, dns)
    card_options = sd_card.CardOptions(
        name="",
        hostname=None if hostname is None else sd_card.validate_hostname(hostname),
        user=None if user is None else sd_card.validate_user(user),
        ssh_keys=() if ssh_key is None else _read_ssh_keys(ssh_key),
        network=network,
    )
    card_job = CardJob(
        options=options, card_options=card_options, extra_files=options.load_extras(), system=system, is_forced=force
    )
    if count is not None:
        if hostname or ip:
            raise UsageError("--hostname and --ip are one board's; with --count host names are the boards' names")
        if boot is not None or out is None:
            raise UsageError("--count writes into a folder: --out DIR, with --image FILE.img for whole images")
        names = expand_name_pattern(options.name or "", count, first=first)
        _provision_batch(card_job, names, image=image, out=out, qr_kind=qr, dry_run=dry_run)
    else:
        _provision_one(card_job, boot=boot, image=image, out=out, dry_run=dry_run)


def _provision_one(job: CardJob, *, boot: Path | None, image: Path | None, out: Path | None, dry_run: bool) -> None:
    name = job.options.get_single_name()
    if (boot is None) == (image is None):
        raise UsageError("say where: --boot DIR (a mounted card), or --image FILE.img --out COPY.img")
    if boot is not None and out is not None:
        raise UsageError("--out goes with --image or --count; --boot writes where it says")
    if dry_run:
        _print_diff(job, name, boot, image)
        return
    if image is not None and out is None:
        raise UsageError("--image is not changed: say where its copy goes with --out COPY.img")
    with _open_boot_partition(job, boot, image, out) as (partition, read):
        # Before the token: a rejection must not leave one behind.
        job.render_files(name, PLACEHOLDER_TOKEN, read)
        token = job.options.get_token()
        files, words = job.render_files(name, token, read)
        partition.write(files)
    _print_summary(name, words, files, token)
    click.echo(
        "next: eject the card and start the board with it; `edgefl devices list` shows it in a few minutes. "
        "If not, edgefl/firstboot.log on the card says why"
        if boot is not None
        else f"next: write {out} onto a card as it is, without settings of Raspberry Pi Imager"
    )


@contextmanager
def _open_boot_partition(
    job: CardJob, boot: Path | None, image: Path | None, out: Path | None
) -> Iterator[tuple[BootFolder | BootImage, ReadFile]]:
    if boot is not None:
        folder = BootFolder(boot)
        folder.check(force=job.is_forced)
        yield folder, folder.read
    else:
        assert image is not None
        assert out is not None
        with open_copy(image, out) as partition:
            partition.check(force=job.is_forced)
            yield partition, partition.read


def _print_diff(job: CardJob, name: str, boot: Path | None, image: Path | None) -> None:
    partition: BootFolder | BootImage
    if boot is not None:
        partition = BootFolder(boot)
    else:
        assert image is not None
        if image.suffix in {".xz", ".gz"}:
            raise UsageError("--dry-run looks into an image that is not packed; unpack it first")
        partition = BootImage(image)
    partition.check(force=job.is_forced)
    # Reading a given token does not use it up.
    has_token = job.options.text or job.options.token_file
    token = job.options.get_token() if has_token else PLACEHOLDER_TOKEN
    files, words = job.render_files(name, token, partition.read)
    click.echo(f"{name}: {words}; nothing is written", err=True)
    for line in render_diff(files, partition.read):
        click.echo(line)


def _provision_batch(
    job: CardJob, names: Sequence[str], *, image: Path | None, out: Path, qr_kind: str, dry_run: bool
) -> None:
    if image is None and job.system == "bookworm":
        raise UsageError("Bookworm's cmdline.txt is the card's own: give its image with --image, or use --boot")
    if dry_run:
        for name in names:
            click.echo(out / (f"{name}.img" if image else name))
        return
    if any((out / name).exists() or (out / f"{name}.img").exists() for name in names):
        raise UsageError(f"{out} holds some of these boards already; take another folder, or another --first")
    if out.is_dir() and (mode := out.stat().st_mode & 0o777) & 0o077:
        raise UsageError(
            f"{out} is open to others (mode {mode:o}), and whoever has a card's files can join in its place: "
            f"chmod 700 {out}, or take a folder that does not exist yet"
        )
    if image is None:
        job.render_files(names[0], PLACEHOLDER_TOKEN, lambda _: None)  # rejects before tokens are made
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    tokens = job.options.get_tokens(len(names))
    for name, token in zip(names, tokens, strict=True):
        _write_batch_card(job, name, token, image=image, out=out)
    _write_sheet(job.options, out, names, tokens, has_tokens=qr_kind == "join")
    if image is None:
        click.echo("next: copy what is in each folder onto the boot partition of that board's card")


def _write_batch_card(job: CardJob, name: str, token: IssuedToken, *, image: Path | None, out: Path) -> None:
    if image is not None:
        with open_copy(image, out / f"{name}.img") as partition:
            partition.check(force=job.is_forced)
            files, words = job.render_files(name, token, partition.read)
            partition.write(files)
    else:
        (out / name).mkdir(mode=0o700)
        folder = BootFolder(out / name)
        files, words = job.render_files(name, token, folder.read)
        folder.write(files)
    _print_summary(name, words, files, token)


def _write_sheet(
    options: ProvisionOptions, out: Path, names: Sequence[str], tokens: Sequence[IssuedToken], *, has_tokens: bool
) -> None:
    labels = []
    for name, token in zip(names, tokens, strict=True):
        addresses = options.make_join_file(name, token.token).addresses
        labels.append(DeviceLabel(name=name, token=token.token, addresses=addresses, expires=token.expires))
    write_atomic(out / "sheet.html", render_sheet(labels, has_tokens=has_tokens).encode())
    click.echo(f"sheet to print: {out / 'sheet.html'}")


def _print_summary(name: str, system: str, files: Mapping[str, bytes | Path], token: IssuedToken) -> None:
    click.echo(f"{name}: {system}, {len(files)} files, {count_bytes(files) / 1e6:.1f} MB{token.format_expiry()}")


def _read_ssh_keys(file: TextIO) -> tuple[str, ...]:
    return sd_card.parse_ssh_keys(read_text(file, f"the SSH key {file.name}", max_chars=65536), file.name)


def _get_pre_shared_key(ssid: str, password: str | None) -> str:
    if password is None:
        if not sys.stdin.isatty():
            raise UsageError("the Wi-Fi's password is missing: EDGEFL_WIFI_PASSWORD, --wifi-password or --wifi-open")
        password = str(click.prompt(f"Password of {ssid}", hide_input=True, err=True))
    return compute_pre_shared_key(ssid, password)


def _apply_address(network: CardNetwork, ip: str | None, gateway: str | None, dns: tuple[str, ...]) -> CardNetwork:
    if ip is None:
        if gateway or dns:
            raise UsageError("--gateway and --dns go with a fixed address: --ip 10.0.0.7/24")
        return network
    address, router, servers = validate_static_address(ip, gateway, dns)
    return replace(network, address=address, gateway=router, dns=servers)
