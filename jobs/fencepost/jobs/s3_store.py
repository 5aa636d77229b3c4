"""Immutable objects in a bucket of S3, or of a server that speaks its protocol, by boto3 (extra ``s3``).

<prefix>.fencepost-store      the identity of the store
<prefix>objects/abcdef...     objects, named by the sha256 of their content
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import ClientError

from fencepost.jobs.objects import Stored
from fencepost.jobs.s3_errors import code, status, typed
from fencepost.schemas.errors import ConfigError, Damaged, InvalidInput, ObjectGone

if TYPE_CHECKING:
    from types_boto3_s3.client import S3Client
    from types_boto3_s3.type_defs import PutObjectRequestTypeDef, ResponseMetadataTypeDef

__all__ = ["S3Store", "connect"]

MARKER = ".fencepost-store"
OBJECTS = "objects/"
NAME = re.compile(r"[0-9a-f]{64}")
IDENTITY = re.compile(r"s3:[0-9a-f-]{36}")
# Larger content goes in parts of at least this size; a server takes at most 10,000 of them.
PART_BYTES = 8 << 20
PARTS_MAX = 9_000
# So many are sent at a time. What boto3 holds of the others is bounded by ten more.
CONCURRENCY = 4
PAGE = 1_000
CONNECT_SECONDS = 5.0


def connect() -> S3Client:
    """A client as the environment and the files of AWS describe it, which gives up connecting within five seconds.

    AWS_ENDPOINT_URL_S3 names another server than Amazon's; AWS_MAX_ATTEMPTS and AWS_RETRY_MODE say how often it tries.
    """
    return cast("S3Client", boto3.Session().client("s3", config=Config(connect_timeout=CONNECT_SECONDS)))


class S3Store:
    """Durable objects in a bucket of a server whose reads, lists and deletes show every write that has been answered.

    Opens a store that `create` has made, and raises ConfigError for any other place. ``prefix`` is empty or ends with a
    slash. ``connect`` makes a client of boto3, which keeps addresses, credentials, timeouts and retries; it is called twice.
    ``conditional=False`` is for servers that refuse writes with ``If-None-Match``.

    Ages are by the server's clock; of an object that was sent in parts they count from the start of its put. Errors never
    carry credentials or content: Unreachable when the server did not answer or asks to try again, ConfigError naming
    ``bucket``, ``prefix``, ``credentials`` or ``store`` (the server's own code says why) for all that trying again cannot mend.
    """

    def __init__(
        self, bucket: str, prefix: str = "", *, connect: Callable[[], S3Client] = connect, conditional: bool = True
    ) -> None:
        self._bucket, self._prefix, self._conditional = bucket, _prefix(prefix), conditional
        with typed():
            self._client, self._once = connect(), connect()
            self._once.meta.events.register("before-parameter-build.s3.CompleteMultipartUpload", _only_once)
        try:
            identity = self._read(prefix + MARKER).decode("ascii", "replace").strip()
        except ObjectGone:
            raise ConfigError(
                "the bucket holds no object store under this prefix",
                field="prefix",
                hint="give the right one, or make a new one with S3Store.create",
            ) from None
        except Damaged:
            identity = ""
        if IDENTITY.fullmatch(identity) is None:
            raise ConfigError(
                "the marker of the object store is not readable", field="prefix", hint=f"look at {MARKER}"
            )
        self._identity = identity

    @classmethod
    def create(
        cls, bucket: str, prefix: str = "", *, connect: Callable[[], S3Client] = connect, conditional: bool = True
    ) -> S3Store:
        """Makes the place in an existing bucket a store, once: two that do so at a time open the same one; objects stay.

        Without conditional writes do it once, from one place: of two at a time, one may open a store that is no more.
        """
        marker: PutObjectRequestTypeDef = {
            "Bucket": bucket,
            "Key": _prefix(prefix) + MARKER,
            "Body": f"s3:{uuid.uuid4()}\n".encode(),
        }
        with typed():
            client = connect()
            if conditional:
                marker["IfNoneMatch"] = "*"
            try:
                if conditional or _head(client, bucket, marker["Key"]) is None:
                    client.put_object(**marker)
            except ClientError as error:
                if status(error) != 412:
                    raise
        return cls(bucket, prefix, connect=connect, conditional=conditional)

    @property
    def identity(self) -> str:
        """``s3:`` and the UUID that the store was made with."""
        return self._identity

    def put(self, data: bytes | BinaryIO) -> Stored:
        """Durable once it returns, whole or not at all; the same content again is the same object, whole and young again.

        ``data``: the content, or a binary file that is read to its end: twice when it can seek, else by way of a temporary
        file. Memory holds about a dozen parts (8 MiB, more beyond 70 GiB). The server proves what is sent at once by its
        sha256, and of parts nothing becomes an object unless all that was sent has the digest that is its name.

        The first put of a content is conditional, so that nothing is overwritten unnoticed; content that is there already
        is written again. Raises InvalidInput (``data``) when a file changes meanwhile, and what reading the file raises.

        Crash here: [M] parts of what was being sent stay, or an object that nothing references; both are removed when they
        are old.
        """
        source = io.BytesIO(data) if isinstance(data, bytes) else data
        with ExitStack() as opened, typed():
            start = source.tell() if source.seekable() else None
            first = _filled(source, PART_BYTES + 1)
            if len(first) <= PART_BYTES:
                return self._put_at_once(first)
            if start is None:
                spooled, start = opened.enter_context(tempfile.TemporaryFile()), 0
                spooled.write(first)
                shutil.copyfileobj(source, spooled, PART_BYTES)
                source = spooled
            del first
            return self._put_in_parts(source, start)

    def age(self, name: str) -> float | None:
        """Seconds since it was last put, by the server's clock; None when it is not there."""
        with typed():
            return _head(self._client, self._bucket, self._key(name))

    def read(self, name: str) -> bytes:
        """The content; Damaged when it does not have this name, ObjectGone when it is not there."""
        content = self._read(self._key(name))
        if hashlib.sha256(content).hexdigest() != name:
            raise Damaged("the content of the object is not what its name says", field="object", hint="put it again")
        return content

    def names(self) -> Iterator[tuple[str, float]]:
        """Name and age of every object; a page of a thousand is in memory at a time."""
        with typed():
            pages = self._client.get_paginator("list_objects_v2")
            where = self._prefix + OBJECTS
            for page in pages.paginate(Bucket=self._bucket, Prefix=where, PaginationConfig={"PageSize": PAGE}):
                now = _now(page["ResponseMetadata"])
                for found in page.get("Contents", []):
                    name = found.get("Key", "").removeprefix(where)
                    if NAME.fullmatch(name) is not None and "LastModified" in found:
                        yield name, _seconds(now, found["LastModified"])

    def delete(self, name: str) -> None:
        """Gone once it returns; where the bucket keeps versions, hidden until its own rules end them."""
        with typed():
            self._client.delete_object(Bucket=self._bucket, Key=self._key(name))

    def tidy(self, older_than: float) -> int:
        """Gives up uploads that began more than so many seconds ago, and frees their parts; returns how many.

        Whoever still sends one gets Unreachable: give more time than the longest put takes.
        """
        removed = 0
        with typed():
            pages = self._client.get_paginator("list_multipart_uploads")
            where = self._prefix + OBJECTS
            for page in pages.paginate(Bucket=self._bucket, Prefix=where, PaginationConfig={"PageSize": PAGE}):
                now = _now(page["ResponseMetadata"])
                for left in page.get("Uploads", []):
                    key, upload, began = left.get("Key"), left.get("UploadId"), left.get("Initiated")
                    if key and upload and began and _seconds(now, began) > older_than:
                        try:
                            self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)
                        except ClientError as error:
                            if code(error) != "NoSuchUpload":
                                raise
                            continue
                        removed += 1
        return removed

    def close(self) -> None:
        """Ends its connections; the store is not to be used afterwards."""
        self._client.close()
        self._once.close()

    def _read(self, key: str) -> bytes:
        with typed():
            try:
                return self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
            except ClientError as error:
                if code(error) != "NoSuchKey":
                    raise
                raise ObjectGone("the object is not in its store", field="object", hint="put it again") from None

    def _put_at_once(self, content: bytes) -> Stored:
        digest = hashlib.sha256(content)

        def write(once: bool) -> None:
            request: PutObjectRequestTypeDef = {
                "Bucket": self._bucket,
                "Key": self._key(digest.hexdigest()),
                "Body": content,
                "ChecksumSHA256": base64.b64encode(digest.digest()).decode(),
            }
            if once:
                request["IfNoneMatch"] = "*"
            self._client.put_object(**request)

        return self._written(digest.hexdigest(), len(content), write, self._conditional)

    def _put_in_parts(self, source: BinaryIO, start: int) -> Stored:
        source.seek(start)
        digest, size = hashlib.sha256(), 0
        while part := source.read(PART_BYTES):
            digest.update(part)
            size += len(part)
        name = digest.hexdigest()
        config = TransferConfig(
            multipart_threshold=PART_BYTES,
            multipart_chunksize=max(PART_BYTES, math.ceil(size / PARTS_MAX)),
            max_concurrency=CONCURRENCY,
        )

        def write(once: bool) -> None:
            source.seek(start)
            client = self._once if once else self._client
            proven = cast("IO[bytes]", _Proven(source, name, size))
            client.upload_fileobj(proven, self._bucket, self._key(name), Config=config)

        # Asked first: a condition would be looked at only after all the parts were sent.
        return self._written(name, size, write, self._conditional and self.age(name) is None)

    def _written(self, name: str, size: int, write: Callable[[bool], None], once: bool) -> Stored:
        try:
            write(once)
        except ClientError as error:
            if not once or status(error) not in (409, 412):
                raise
            # Never "it is there already": written again it is young, and whole whatever became of it.
            write(False)
        return Stored(self._identity, name, size)

    def _key(self, name: str) -> str:
        if NAME.fullmatch(name) is None:
            raise InvalidInput("not the name of an object", field="object", hint="pass what put returned")
        return self._prefix + OBJECTS + name


class _Proven:
    """A file that cannot be read to its end unless it has this digest: boto3 completes no upload of another content."""

    def __init__(self, source: BinaryIO, name: str, size: int) -> None:
        self._source, self._name, self._left = source, name, size
        self._digest = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        part = _filled(self._source, size)
        self._digest.update(part)
        self._left -= len(part)
        ended = self._left <= 0 or len(part) < size
        if ended and (self._left != 0 or self._digest.hexdigest() != self._name):
            raise InvalidInput(
                "the file changed while it was put", field="data", hint="put a file that nobody writes to"
            )
        return part


def _filled(source: BinaryIO, size: int) -> bytes:
    """So many bytes, or all that are left."""
    parts = bytearray()
    while len(parts) < size and (part := source.read(size - len(parts))):
        parts += part
    return bytes(parts)


def _prefix(prefix: str) -> str:
    if prefix and (not prefix.endswith("/") or prefix.startswith("/")):
        raise ConfigError(
            "the prefix is not that of a folder", field="prefix", hint="end it with a slash, and begin it with none"
        )
    return prefix


def _only_once(params: dict[str, Any], **_: object) -> None:
    params["IfNoneMatch"] = "*"


def _head(client: S3Client, bucket: str, key: str) -> float | None:
    try:
        found = client.head_object(Bucket=bucket, Key=key)
    except ClientError as error:
        if status(error) != 404:
            raise
        return None
    return _seconds(_now(found["ResponseMetadata"]), found["LastModified"])


def _now(answer: ResponseMetadataTypeDef) -> datetime:
    """The server's time of this answer; ours where it does not say."""
    date = answer["HTTPHeaders"].get("date")
    return datetime.now(UTC) if date is None else parsedate_to_datetime(date)


def _seconds(now: datetime, then: datetime) -> float:
    return max(0.0, (now - then).total_seconds())
