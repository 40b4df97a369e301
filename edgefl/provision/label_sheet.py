"""Many devices at once: names from one pattern, and a printable sheet of labels."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import segno

from edgefl.core.errors import UsageError
from edgefl.core.protocol import JOIN_TOKEN_VARIABLE, JoinToken, validate_slug
from edgefl.provision import provisioning_files

MAX_NAMES = 10_000
_PLACEHOLDER = re.compile(r"\{(?::(0?)([1-9])?d?)?\}")
DIGITS_PER_GROUP = 8


def expand_name_pattern(pattern: str, count: int, *, first: int = 1) -> list[str]:
    """Returns the names of `count` boards, such as pi-01, pi-02 for `pi-{:02d}`.

    Raises:
        UsageError: the pattern has no place for a number, or makes no device names.
    """
    if not 1 <= count <= MAX_NAMES:
        raise UsageError(f"--count must be from 1 to {MAX_NAMES}, got {count}")
    placeholders = _PLACEHOLDER.findall(pattern)
    if len(placeholders) != 1:
        raise UsageError(f"a name for many boards has one place for the number, as in pi-{{:02d}}, got {pattern!r}")
    zero, width = placeholders[0]
    numbers = [f"{number:{zero}{width}d}" if width else str(number) for number in range(first, first + count)]
    return [validate_slug(_PLACEHOLDER.sub(number, pattern)) for number in numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLabel:
    """One device; `addresses` are tried first, `expires` is the end of its token's validity."""

    name: str
    token: JoinToken = field(repr=False)
    addresses: tuple[str, ...] = ()
    expires: str | None = None

    @property
    def join_address(self) -> str:
        return (*self.addresses, *self.token.addresses, "?")[0]


def render_sheet(labels: Sequence[DeviceLabel], *, has_tokens: bool) -> str:
    """Returns a self-contained page: A4, ten labels a side.

    Without tokens a QR code leads to the device's page at the coordinator, and the sheet may be public. With
    tokens it holds the command that joins a device by hand: the sheet is then a secret.
    """
    warning = (
        '<p class="secret">This sheet holds join tokens. Whoever reads a code can let one board in, until it was '
        "used or its time is over. Keep it like a key; destroy it afterwards.</p>"
        if has_tokens
        else '<p class="note">This sheet holds no secrets: the join tokens lie on the cards alone.</p>'
    )
    fleet = labels[0].token.fleet if labels else ""
    values = {
        "FLEET": escape(fleet),
        "COUNT": str(len(labels)),
        "NOTE": warning,
        "LABELS": "\n".join(_render_label(label, has_tokens=has_tokens) for label in labels),
    }
    page = provisioning_files.load_text("sheet.html")
    for name, value in values.items():
        page = page.replace(f"@{name}@", value)
    return page


def _render_label(label: DeviceLabel, *, has_tokens: bool) -> str:
    if has_tokens:
        text, caption = (
            f"{JOIN_TOKEN_VARIABLE}={label.token.text()} edgefl device join {label.join_address} --name {label.name}",
            "joins by hand",
        )
    else:
        text, caption = f"https://{label.join_address}/#/devices/{label.name}", "its page"
    expiry = f"<dt>until</dt><dd>{escape(label.expires)}, once</dd>" if label.expires else ""
    return (
        f'<article><div class="words"><h2>{escape(label.name)}</h2><dl>'
        f"<dt>fleet</dt><dd>{escape(label.token.fleet)}</dd>"
        f"<dt>joins at</dt><dd>{escape(label.join_address)}</dd>{expiry}"
        f'<dt>CA</dt><dd class="ca">{_group_digits(label.token.ca_fingerprint)}</dd></dl></div>'
        f"<figure>{_render_qr_code(text, error_correction='l' if has_tokens else 'm')}"
        f"<figcaption>{caption}</figcaption></figure></article>"
    )


def _group_digits(digits: str) -> str:
    return " ".join(digits[start : start + DIGITS_PER_GROUP] for start in range(0, len(digits), DIGITS_PER_GROUP))


def _render_qr_code(text: str, *, error_correction: str) -> str:
    buffer = io.BytesIO()
    segno.make(text, error=error_correction, micro=False).save(
        buffer, kind="svg", omitsize=True, dark="#000", light="#fff", xmldecl=False, nl=False
    )
    return buffer.getvalue().decode()
