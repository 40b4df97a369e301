"""A sheet of labels to print, one for each board: which card belongs where, and how to look at it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import segno

from edgefl.protocol import JoinToken
from edgefl.provision import sources

GROUP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One board; `addresses` are tried first, `expires` says until when its token lets in."""

    name: str
    token: JoinToken = field(repr=False)
    addresses: tuple[str, ...] = ()
    expires: str | None = None

    @property
    def site(self) -> str:
        return (*self.addresses, *self.token.addresses, "?")[0]


def sheet(labels: Sequence[Label], *, with_tokens: bool) -> str:
    """Returns a page that stands for itself: A4, ten labels a side.

    Without tokens a QR code leads to the board's page at the coordinator, and the sheet may hang anywhere. With
    tokens it holds the command that joins a board by hand: whoever has the sheet can let a board in.
    """
    warning = (
        '<p class="secret">This sheet holds join tokens. Whoever reads a code can let one board in, until it was '
        "used or its time is over. Keep it like a key; destroy it afterwards.</p>"
        if with_tokens
        else '<p class="note">This sheet holds no secrets: the join tokens lie on the cards alone.</p>'
    )
    fleet = labels[0].token.fleet if labels else ""
    values = {
        "FLEET": escape(fleet),
        "COUNT": str(len(labels)),
        "NOTE": warning,
        "LABELS": "\n".join(_label(label, with_tokens=with_tokens) for label in labels),
    }
    page = sources.text("sheet.html")
    for name, value in values.items():
        page = page.replace(f"@{name}@", value)
    return page


def _label(label: Label, *, with_tokens: bool) -> str:
    if with_tokens:
        text, told = (
            f"edgefl device join {label.site} --token {label.token.text()} --name {label.name}",
            "joins by hand",
        )
    else:
        text, told = f"https://{label.site}/#/devices/{label.name}", "its page"
    until = f"<dt>until</dt><dd>{escape(label.expires)}, once</dd>" if label.expires else ""
    return (
        f'<article><div class="words"><h2>{escape(label.name)}</h2><dl>'
        f"<dt>fleet</dt><dd>{escape(label.token.fleet)}</dd>"
        f"<dt>joins at</dt><dd>{escape(label.site)}</dd>{until}"
        f'<dt>CA</dt><dd class="ca">{_grouped(label.token.ca_fingerprint)}</dd></dl></div>'
        f"<figure>{_code(text, error='l' if with_tokens else 'm')}<figcaption>{told}</figcaption></figure></article>"
    )


def _grouped(digits: str) -> str:
    return " ".join(digits[start : start + GROUP] for start in range(0, len(digits), GROUP))


def _code(text: str, *, error: str) -> str:
    out = io.BytesIO()
    segno.make(text, error=error, micro=False).save(
        out, kind="svg", omitsize=True, dark="#000", light="#fff", xmldecl=False, nl=False
    )
    return out.getvalue().decode()
