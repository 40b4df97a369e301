"""Files in an object storage that speaks S3: sent and fetched in parts, from where it broke off, and checked by hash.

fsspec and s3fs do the talking, with the credentials, the region and the endpoint (`AWS_ENDPOINT_URL`) that other
programs for S3 use. An object appears when its last part has come: it is the old one or the new one, never a part.
"""

from __future__ import annotations

import base64
import fcntl
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgefl.core.errors import (
    DataError,
    EdgeflError,
    NetworkError,
    NotAllowedError,
    NotFoundError,
    StoreError,
    UsageError,
)
from edgefl.core.safe_parsing import SHA256, parse_json
from edgefl.system.atomic_files import compute_sha256, make_store_error, sync_directory, write_atomic

SCHEME = "s3://"
PART_BYTES = 16 * 1024 * 1024
MAX_PARTS = 10_000
"""S3's own limit; larger files have larger parts."""
HASH_KEY = "sha256"
"""Of an object's metadata: the SHA-256 of its content, in hex digits."""
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
MAX_KEY_BYTES = 1024
_USER_OF_URL = re.compile(r"(?<=//).*@", re.DOTALL)
_MAX_STATE_BYTES = 4 * 1024 * 1024
"""A tag for each of `MAX_PARTS`, several times over."""


@dataclass(frozen=True, slots=True)
class ObjectAddress:
    """Where an object lies: `s3://BUCKET/KEY`. A key that ends with a slash is a folder."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}"

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    def join(self, name: str) -> ObjectAddress:
        """Returns the address of a file in this folder; the address itself where it is that of a file."""
        return ObjectAddress(self.bucket, self.key + name) if not self.name else self


def parse_address(text: str, *, allow_folder: bool = True) -> ObjectAddress:
    """Returns an address; raises a `UsageError` where it is none, or that of a folder which is not allowed."""
    bucket, _, key = text.removeprefix(SCHEME).partition("/")
    address = ObjectAddress(bucket, key)
    is_key = len(key.encode(errors="replace")) <= MAX_KEY_BYTES and key.isprintable()
    is_key = is_key and (allow_folder or address.name != "")
    if not text.startswith(SCHEME) or not _BUCKET.match(bucket) or not is_key:
        raise UsageError(
            f"an address of an object is {SCHEME}BUCKET/KEY, such as s3://lab/fleet.tar.gz; got {text!r:.80}"
        )
    return address


def upload_file(
    path: Path, address: ObjectAddress, *, replace: bool = False, sha256: str | None = None
) -> ObjectAddress:
    """Sends a file, and returns where it is; one whose sending broke off goes on behind the parts that are there.

    Args:
        path: the file; beside it lies what is known of a sending that broke off.
        address: of the object, or of a folder, where it gets the name of the file.
        replace: whether another object may be replaced; the same file is never sent again.
        sha256: of its content; None for whatever it is.

    Raises:
        UsageError: another object is there.
        MissingPackageError: s3fs is not installed.
        NotFoundError: there is no such bucket.
        NetworkError: the storage cannot be reached, or answers nonsense.
        NotAllowedError: it does not let us.
        StoreError: the file cannot be read, or nothing be written beside it.
        DataError: the file changes meanwhile.
    """
    address = address.join(path.name)
    try:
        key = _make_key(path, address)
        _check_unchanged(path, key[HASH_KEY], sha256 or key[HASH_KEY])
        state = _read_state(path)
        if state is None or not key.items() <= state.items():
            _abort(state)
            state = {**key, "id": "", "tags": {}}
            _write_state(path, state)
        stored = _StoredObject(address)
        try:
            _send(stored, path, state, replace=replace)
        except (DataError, UsageError):  # it will not go on
            _abort(state)
            _get_state_path(path).unlink(missing_ok=True)
            raise
        _get_state_path(path).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{path} cannot be sent: {error.strerror or error}") from None
    return address


def has_open_upload(path: Path, address: ObjectAddress) -> bool:
    """Returns whether a sending of this very file to this address has broken off, be it before its first byte."""
    state = _read_state(path)
    try:
        return state is not None and _make_key(path, address.join(path.name)).items() <= state.items()
    except OSError as error:
        raise make_store_error(path, error) from None


def download_file(
    address: ObjectAddress, path: Path, *, max_bytes: int | None = None, sha256: str | None = None
) -> None:
    """Fetches an object into a file, from where an earlier try broke off; the file appears when all is right.

    Args:
        address: of the object.
        path: the new file, in a folder that exists.
        max_bytes: that it may have; None for no limit.
        sha256: of its content; None for what was noted when edgefl sent it, or for none.

    Raises:
        NotFoundError: there is no such object.
        DataError: it is larger, changes meanwhile, or its content has another SHA-256.
        MissingPackageError, NetworkError, NotAllowedError: as `upload_file`.
        StoreError: the file cannot be written, or another command fetches it.
    """
    stored = _StoredObject(address)
    found = stored.find()
    if found is None:
        raise NotFoundError(f"there is no object {address}")
    if max_bytes is not None and found.num_bytes > max_bytes:
        raise DataError(f"{address} has {found.num_bytes} bytes, at most {max_bytes} are taken")
    # Of this state of the object: what was fetched of another one is not gone on with.
    mark = hashlib.sha256(f"{address} {found.tag} {found.num_bytes}".encode()).hexdigest()[:12]
    partial = path.with_name(f".{path.name}.{mark}.part")
    try:
        for other in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
            if other != partial:
                other.unlink()
        _fetch_parts(stored, found, partial)
        expected, actual = sha256 or found.sha256, compute_sha256(partial)
        if expected not in {"", actual}:
            partial.unlink()
            raise DataError(f"{address} must have SHA-256 {expected}, got {actual}; bring it there again")
        partial.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise make_store_error(path, error) from None


def remove_object(address: ObjectAddress) -> None:
    """Removes an object, if it is there.

    Raises:
        MissingPackageError, NotFoundError, NetworkError, NotAllowedError: as `upload_file`.
    """
    _StoredObject(address).call("delete_object")


def list_objects(folder: ObjectAddress) -> list[str]:
    """Returns the names of the objects in a folder and below, without its own; raises as `remove_object`."""
    stored, names = _StoredObject(folder), list[str]()
    options: dict[str, str] = {}
    while True:
        answer = _require(stored, stored.call_folder("list_objects_v2", Prefix=folder.key, **options))
        names += [str(entry["Key"]).removeprefix(folder.key) for entry in answer.get("Contents", ())]
        if not answer.get("IsTruncated"):
            return names
        options = {"ContinuationToken": answer["NextContinuationToken"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Object:
    """An object that is there; `sha256` is empty where nobody has noted it."""

    num_bytes: int
    tag: str
    sha256: str


class _StoredObject:
    """Place of an object; what goes wrong in the storage becomes an error of ours.

    Raises:
        UsageError: its endpoint has a password in it, or would be spoken to in the clear.
    """

    def __init__(self, address: ObjectAddress) -> None:
        from s3fs import S3FileSystem  # noqa: PLC0415 an extra

        self._address, self._storage = address, S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
        with self._errors():
            self._storage.connect()
            url = str(self._storage.s3.meta.endpoint_url)
            endpoint = urlsplit(url)
        if "@" in url:
            raise UsageError(
                "AWS_ENDPOINT_URL must name no user and no password; "
                "keys are in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or in ~/.aws"
            )
        if endpoint.scheme != "https" and endpoint.hostname not in LOOPBACK_HOSTS:
            raise UsageError(f"AWS_ENDPOINT_URL must be https:// or of this machine, got {url!r:.200}")

    def __str__(self) -> str:
        return str(self._address)

    def call(self, method: str, **options: Any) -> Any:
        """Returns the answer to a request about the object, by its name in boto3; None where nothing is there."""
        return self.call_folder(method, Key=self._address.key, **options)

    def call_folder(self, method: str, **options: Any) -> Any:
        """Returns the answer to a request about the bucket; None where nothing is there."""
        with self._errors():
            try:
                return self._storage.call_s3(method, Bucket=self._address.bucket, **options)
            except FileNotFoundError as error:
                response = getattr(error.__cause__, "response", None)
                if response is None:  # no answer of the storage: a file of this machine's settings
                    raise
                if response["Error"].get("Code") == "NoSuchBucket":
                    raise NotFoundError(f"{self._address}: there is no such bucket; make it first") from None
                return None

    def find(self) -> _Object | None:
        """Returns what is there."""
        found = self.call("head_object")
        if found is None:
            return None
        with self._errors():
            noted = str(found.get("Metadata", {}).get(HASH_KEY, ""))
            return _Object(
                num_bytes=int(found["ContentLength"]),
                tag=str(found["ETag"]),
                sha256=noted if SHA256.match(noted) else "",
            )

    def read(self, start: int, end: int, tag: str) -> bytes:
        """Returns a part of the content of the object with this tag."""
        from fsspec.asyn import sync  # noqa: PLC0415 an extra

        answer = _require(self, self.call("get_object", Range=f"bytes={start}-{end - 1}", IfMatch=tag))
        with self._errors():
            content: bytes = sync(self._storage.loop, _read_body, answer["Body"], end - start)
        if len(content) != end - start:
            raise NetworkError(f"{self} gave {len(content)} of {end - start} bytes; try again, which goes on there")
        return content

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 an extra

        try:
            yield
        except PermissionError as error:
            raise NotAllowedError(
                f"{self._address}: the storage does not allow it: {_USER_OF_URL.sub('', str(error))}"
            ) from None
        except (OSError, BotoCoreError, ClientError, LookupError, TypeError, ValueError) as error:
            raise NetworkError(
                f"{self._address}: the storage cannot be used: {type(error).__name__}: "
                + _USER_OF_URL.sub("", str(error))
            ) from None


async def _read_body(body: Any, num_bytes: int) -> bytes:
    """Returns the first bytes of an answer; less where it ends before."""
    content = bytearray()
    try:
        while len(content) < num_bytes and (block := await body.read(num_bytes - len(content))):
            content += block
    finally:
        body.close()  # what comes beyond is not read
    return bytes(content)


def _encode_md5(content: bytes) -> str:
    """Returns what the storage checks a part by when it arrives."""
    return base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()


def _check_unchanged(path: Path, sha256: str, expected: str) -> None:
    if sha256 != expected:
        raise DataError(f"{path} changed while it was sent; send it again")


# Sending


def _get_state_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.upload")


def _make_key(path: Path, address: ObjectAddress) -> dict[str, Any]:
    """Returns what tells a sending from others: one that broke off goes on only where all of it is the same."""
    part_bytes = max(PART_BYTES, -(-path.stat().st_size // MAX_PARTS))
    return {"address": str(address), HASH_KEY: compute_sha256(path), "part_bytes": part_bytes}


def _send(stored: _StoredObject, path: Path, state: dict[str, Any], *, replace: bool) -> None:
    found, sha256 = stored.find(), state[HASH_KEY]
    if found is not None and found.sha256 == sha256:
        _abort(state)
        return
    if found is not None and not replace:
        raise UsageError(f"there is another object at {stored} already; name a new one")
    if path.stat().st_size > state["part_bytes"]:
        _upload_parts(stored, path, state)
        return
    content = path.read_bytes()
    _check_unchanged(path, hashlib.sha256(content).hexdigest(), sha256)
    answer = stored.call("put_object", Body=content, ContentMD5=_encode_md5(content), Metadata={HASH_KEY: sha256})
    _require(stored, answer)


def _upload_parts(stored: _StoredObject, path: Path, state: dict[str, Any]) -> None:
    sha256 = state[HASH_KEY]
    sent = _list_sent(stored, state["id"]) if state["id"] else None
    if sent is None:
        answer = _require(stored, stored.call("create_multipart_upload", Metadata={HASH_KEY: sha256}))
        sent, state["id"], state["tags"] = {}, str(answer["UploadId"]), {}
        _write_state(path, state)
    tags, digest = state["tags"], hashlib.sha256()
    number = 0
    with path.open("rb") as file:
        while content := file.read(state["part_bytes"]):
            digest.update(content)
            number += 1
            # The storage's own tags, which are no MD5 where it encrypts.
            if number in sent and sent[number] == tags.get(str(number)):
                continue
            answer = stored.call(
                "upload_part",
                UploadId=state["id"],
                PartNumber=number,
                Body=content,
                ContentMD5=_encode_md5(content),
            )
            tags[str(number)] = str(_require(stored, answer)["ETag"])
            _write_state(path, state)
    _check_unchanged(path, digest.hexdigest(), sha256)
    parts = [{"PartNumber": one, "ETag": tags[str(one)]} for one in range(1, number + 1)]
    answer = stored.call("complete_multipart_upload", UploadId=state["id"], MultipartUpload={"Parts": parts})
    # Where an answer was lost, it is asked for once more, of a sending that is over.
    if answer is None and ((found := stored.find()) is None or found.sha256 != sha256):
        _require(stored, answer)


def _require(stored: _StoredObject, answer: Any) -> Any:
    if answer is None:
        raise NetworkError(f"{stored}: the storage has no such object, sending or bucket; try again")
    return answer


def _abort(state: dict[str, Any] | None) -> None:
    """Frees the room of the parts of a sending that does not go on, where the storage can be reached."""
    if state is not None and state["id"]:
        with suppress(EdgeflError):
            stored = _StoredObject(parse_address(state["address"]))
            stored.call("abort_multipart_upload", UploadId=state["id"])


def _write_state(path: Path, state: dict[str, Any]) -> None:
    write_atomic(_get_state_path(path), json.dumps(state).encode())


def _read_state(path: Path) -> dict[str, Any] | None:
    """Returns what is known of the last sending of a file that broke off, to wherever; None where nothing is."""
    try:
        with _get_state_path(path).open("rb") as file:
            state = parse_json(file.read(_MAX_STATE_BYTES))
    except (OSError, ValueError):
        return None
    kinds = {"address": str, HASH_KEY: str, "part_bytes": int, "id": str, "tags": dict}
    if not isinstance(state, dict) or not all(isinstance(state.get(name), kind) for name, kind in kinds.items()):
        return None
    return state


def _list_sent(stored: _StoredObject, upload_id: str) -> dict[int, str] | None:
    """Returns the tags of the parts that are there by number; None where the storage has given the sending up."""
    sent: dict[int, str] = {}
    while (page := stored.call("list_parts", UploadId=upload_id, PartNumberMarker=max(sent, default=0))) is not None:
        parts = {int(part["PartNumber"]): str(part["ETag"]) for part in page.get("Parts", [])}
        sent |= parts
        if not page.get("IsTruncated") or not parts or len(sent) > MAX_PARTS:
            return sent
    return None


# Fetching


def _fetch_parts(stored: _StoredObject, found: _Object, partial: Path) -> None:
    with partial.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"another command fetches {stored} into {partial}; wait for it") from None
        partial.chmod(0o600)
        while (start := file.tell()) < found.num_bytes:
            file.write(stored.read(start, min(start + PART_BYTES, found.num_bytes), found.tag))
            file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    if size != found.num_bytes:  # more than there is: somebody else wrote into it
        partial.unlink()
        raise DataError(f"{stored}: {partial} has {size} bytes, more than the object; try again")
