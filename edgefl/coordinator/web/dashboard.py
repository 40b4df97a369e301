"""Dashboard page at `/`: a few files of the package, with a strict content security policy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fastapi import APIRouter, Request
from fastapi.responses import Response

from edgefl.core.errors import NotFoundError

PAGE_FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
MEDIA_TYPES = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)
# No inline code, no other origin, no framing; images in data URLs are the QR codes. With trusted types no text can
# become markup, whatever the name of a device or a run.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        # Revalidated each time: an updated coordinator must not be used with the scripts of the former version.
        "Cache-Control": "no-cache",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAsset:
    """One file of the page."""

    body: bytes
    media_type: str
    etag: str


def load_assets(folder: Path = PAGE_FOLDER) -> Mapping[str, PageAsset]:
    """Returns the page's files by name; only those of a type in `MEDIA_TYPES`."""
    page_assets = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in MEDIA_TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            page_assets[path.name] = PageAsset(body=body, media_type=MEDIA_TYPES[path.suffix], etag=etag)
    return page_assets


def dashboard_router() -> APIRouter:
    """Returns the routes of the page's files, without authentication: they hold no data."""
    router, assets = APIRouter(), load_assets()

    @router.get("/")
    async def index(request: Request) -> Response:
        return _respond(request, assets[INDEX])

    @router.get("/edgefl/page/{name}")
    async def file(request: Request, name: str) -> Response:
        if name not in assets:
            raise NotFoundError(f"the page has no file {name[:80]!r}")
        return _respond(request, assets[name])

    return router


def _respond(request: Request, asset: PageAsset) -> Response:
    headers = {**HEADERS, "ETag": asset.etag}
    client_etags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if asset.etag in client_etags:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)
