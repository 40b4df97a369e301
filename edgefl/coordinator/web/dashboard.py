"""Serves the page at `/`: a few files of the package, each under its own path, under a strict content policy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fastapi import APIRouter, Request
from fastapi.responses import Response

from edgefl.errors import NotFoundError

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
TYPES = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)
# Nothing inline, nothing from elsewhere, no page around it; pictures in data URLs are the QR codes. With trusted
# types no text can become markup, whatever a device or a run is called.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        # Asked for anew each time: a coordinator that was updated must not get the scripts of the one before.
        "Cache-Control": "no-cache",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """One file of the page."""

    body: bytes
    media_type: str
    etag: str


def load_assets(folder: Path = FOLDER) -> Mapping[str, Asset]:
    """Returns the page's files by name; those of another type than `TYPES` are no part of it."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            found[path.name] = Asset(body=body, media_type=TYPES[path.suffix], etag=etag)
    return found


def dashboard_router() -> APIRouter:
    """Returns the routes of the page's files; they hold no data, so everybody may have them."""
    router, assets = APIRouter(), load_assets()

    @router.get("/")
    async def index(request: Request) -> Response:
        return _answer(request, assets[INDEX])

    @router.get("/edgefl/page/{name}")
    async def file(request: Request, name: str) -> Response:
        if name not in assets:
            raise NotFoundError(f"the page has no file {name[:80]!r}")
        return _answer(request, assets[name])

    return router


def _answer(request: Request, asset: Asset) -> Response:
    headers = {**HEADERS, "ETag": asset.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if asset.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)
