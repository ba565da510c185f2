"""The routes of packages: one is put under its hash, and asked for by it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from thinwire.contract.packages import Package, PackageList
from thinwire.contract.projects import DEFAULT
from thinwire.contract.script import SHA256
from thinwire.service.auth import InProject, person
from thinwire.service.cursors import LONGEST
from thinwire.service.errors import (
    BodyTooLarge,
    BodyTooSlow,
    InsufficientStorage,
    InvalidRequest,
    PackageNotFound,
    QuotaReached,
    UnsupportedMediaType,
    documented,
)
from thinwire.service.large_answers import large_answer
from thinwire.service.packages.store import Packages, Upload
from thinwire.service.requests import ALWAYS, TAKES_BYTES, known_query, of_plane, zip_bytes

_PART_BYTES = 1 << 20

packages = APIRouter(
    prefix="/v1/packages",
    dependencies=[Depends(person), Depends(known_query)],
    responses=ALWAYS,
    tags=["packages"],
)


Store = Annotated[Packages, of_plane("packages")]
Sha256 = Annotated[str, Path(pattern=SHA256, description="of the zip, 64 hexadecimal digits in lower case")]


@packages.get("", dependencies=[Depends(large_answer)])
def list_packages(
    store: Store,
    project: InProject,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    after: Annotated[str | None, Query(max_length=LONGEST, description="`next` of an earlier answer")] = None,
) -> PackageList:
    """The packages that the service keeps, of the project or of all, in order of their hashes."""
    return store.list(limit, after, project)


@packages.get("/{sha256}", responses=documented(PackageNotFound))
def package(sha256: Sha256, store: Store, project: InProject) -> Package:
    """Whether the service keeps this package, of the project or of any."""
    found = store.find(sha256, project)
    if found is None:
        raise PackageNotFound(sha256)
    return found


@packages.put(
    "/{sha256}",
    name="put_package",
    status_code=201,
    dependencies=[Depends(zip_bytes)],
    responses={
        **documented(BodyTooSlow, BodyTooLarge, QuotaReached, UnsupportedMediaType, InsufficientStorage),
        200: {"model": Package, "description": "The service had it already"},
    },
    openapi_extra=TAKES_BYTES,
)
async def put(sha256: Sha256, store: Store, request: Request, response: Response, project: InProject) -> Package:
    """Keep the folder of a script: a zip, under its sha256. Putting it again changes nothing.

    The zip is looked at, not unpacked: no links, no paths that lead out of the folder, nothing encrypted, and bounds on
    what it unpacks to. A package that no job names goes after a while. It is of the project that is asked for, else of
    the token's, or `default` where that is for all: who has not sent it to a project has it not there.
    """
    request.state.change.project = project = project or DEFAULT
    declared = request.headers.get("content-length", "")
    try:
        if await run_in_threadpool(store.use, sha256, project) and (
            found := await run_in_threadpool(store.find, sha256, project)
        ):
            await _read_out(request, store.max_bytes)
            response.status_code = 200
            return found
        try:
            size, who = int(declared) if declared.isdecimal() else None, request.state.caller.person.name
            upload = await run_in_threadpool(store.upload, sha256, size, who, project)
        except (BodyTooLarge, InsufficientStorage, QuotaReached):
            # Who is still sending would find the connection broken, and not the answer.
            await _read_out(request, store.max_bytes)
            raise
        return await _take(upload, request)
    except ClientDisconnect as error:
        raise InvalidRequest(f"the sender of package {sha256} went away before its end; nothing is kept") from error


async def _take(upload: Upload, request: Request) -> Package:
    """All of the body; nothing is left of one that breaks off."""
    try:
        held = bytearray()
        async for part in request.stream():
            held += part
            if len(held) >= _PART_BYTES:
                await run_in_threadpool(upload.write, bytes(held))
                held.clear()
        await run_in_threadpool(upload.write, bytes(held))
        return await run_in_threadpool(upload.finish)
    finally:
        await run_in_threadpool(upload.close)


async def _read_out(request: Request, most: int) -> None:
    """Read what is being sent, and forget it: at most so much more."""
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            return
