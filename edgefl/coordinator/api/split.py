"""Route of split learning: one request per batch, of the device that has the assignment.

The order matters: the signature of the headers, then the assignment, which says how large a batch may be, then the
body. So at most one batch of each assignment that is out is in memory.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, Query, Request, Response

from edgefl.coordinator.auth import AccessCheck
from edgefl.coordinator.split.service import SplitRequest, SplitRuns
from edgefl.core.errors import DataError, NotAllowedError
from edgefl.core.protocol import BODY_HASH_HEADER, SPLIT_PATH

MAX_SESSION_CHARS = 64
MAX_WIRE_ID_CHARS = 500
MAX_CONCURRENT_BATCHES = 8
"""Threads that wait for the process of the rest, which works on one batch at a time; others wait in the loop."""


def split_router(runs: SplitRuns, *, signer: AccessCheck) -> APIRouter:
    """Returns the route; `signer` admits requests whose headers a device has signed."""
    router, limiter = APIRouter(), CapacityLimiter(MAX_CONCURRENT_BATCHES)

    @router.post(SPLIT_PATH, dependencies=[Depends(signer)])
    async def exchange_batch(
        request: Request,
        assignment: Annotated[str, Query(max_length=MAX_WIRE_ID_CHARS)],
        session: Annotated[str, Query(min_length=1, max_length=MAX_SESSION_CHARS)],
        number: Annotated[int, Query(ge=0, le=2**53)],
        examples: Annotated[int, Query(ge=1, le=2**31)],
    ) -> Response:
        run = runs.get(assignment)
        claimed = run.claim(request.state.device_id, assignment)
        try:
            body = await _read_body(request, claimed.max_bytes)
            batch = SplitRequest(session=session, number=number, num_examples=examples)
            answer = await to_thread.run_sync(run.exchange, claimed, batch, body, limiter=limiter)
        finally:
            if run.release(claimed):
                await to_thread.run_sync(run.end, claimed)
        return Response(answer, media_type="application/octet-stream")

    return router


async def _read_body(request: Request, max_bytes: int) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise DataError(f"a batch of this assignment has at most {max_bytes} bytes")
        chunks.append(chunk)
    body = b"".join(chunks)
    if request.headers.get(BODY_HASH_HEADER) != hashlib.sha256(body).hexdigest():
        raise NotAllowedError("the batch is not the one that was signed")
    return body
