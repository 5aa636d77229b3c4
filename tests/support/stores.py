"""Both kinds of object store behind one face, for tests that hold for each: how to open, age and damage them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.config import Config

from fencepost.jobs.file_store import INCOMING, FileStore
from fencepost.jobs.file_store import MARKER as FILE_MARKER
from fencepost.jobs.objects import ObjectStore
from fencepost.jobs.s3_store import MARKER, OBJECTS, S3Store
from stack.obtain import Obtained
from stack.s3 import S3Server
from support.services import unique

if TYPE_CHECKING:
    from types_boto3_s3.client import S3Client

AGED_SECONDS = 7200.0
PREFIX = "results/"
# One for all: making one reads what boto3 knows of every service. It is for one thread at a time.
SESSION = boto3.Session()
MAKING = threading.Lock()


class Stores(Protocol):
    """Where stores of one kind are made."""

    @property
    def script(self) -> str:
        """Opens the store in a process of its own, with `arguments`."""
        ...

    def create(self, name: str = "store") -> ObjectStore:
        """Makes a store of this name, or opens it."""
        ...

    def open(self, name: str = "store") -> ObjectStore:
        """Opens a store that was made."""
        ...

    def arguments(self, name: str = "store") -> list[str]:
        """What `script` opens the store with."""
        ...

    def place(self, name: str, store: str = "store") -> Path:
        """The file that holds the object, behind the store's back."""
        ...

    def marker(self, store: str = "store") -> Path:
        """The file that holds its identity."""
        ...

    def incoming(self, store: str = "store") -> int:
        """How many puts are under way, or were interrupted."""
        ...

    def aged(self, name: str, store: str = "store") -> None:
        """The object was put two hours ago."""
        ...

    def aged_incoming(self, store: str = "store") -> None:
        """What is under way began two hours ago."""
        ...


def _aged(path: Path) -> None:
    ago = time.time() - AGED_SECONDS
    os.utime(path, (ago, ago))


@dataclass(frozen=True)
class Folders:
    """Stores in folders."""

    root: Path
    script: str = "store = FileStore(Path(sys.argv[1]))"

    def create(self, name: str = "store") -> FileStore:
        return FileStore.create(self.root / name)

    def open(self, name: str = "store") -> FileStore:
        return FileStore(self.root / name)

    def arguments(self, name: str = "store") -> list[str]:
        return [str(self.root / name)]

    def place(self, name: str, store: str = "store") -> Path:
        return self.root / store / name[:2] / name

    def marker(self, store: str = "store") -> Path:
        return self.root / store / FILE_MARKER

    def incoming(self, store: str = "store") -> int:
        return len(list((self.root / store / INCOMING).iterdir()))

    def aged(self, name: str, store: str = "store") -> None:
        _aged(self.place(name, store))

    def aged_incoming(self, store: str = "store") -> None:
        for left in (self.root / store / INCOMING).iterdir():
            _aged(left)


@dataclass(frozen=True)
class Buckets:
    """Stores in buckets of one server, each in a folder of its bucket."""

    server: Obtained[S3Server]
    bucket: str = field(default_factory=lambda: unique("bucket"))
    script: str = "store = S3Store(sys.argv[1], PREFIX, connect=lambda: client(sys.argv[2]))"

    def create(self, name: str = "store") -> S3Store:
        made = self.client()
        if f"{self.bucket}-{name}" not in [bucket.get("Name") for bucket in made.list_buckets().get("Buckets", [])]:
            made.create_bucket(Bucket=f"{self.bucket}-{name}")
        return S3Store.create(f"{self.bucket}-{name}", PREFIX, connect=self.client)

    def open(self, name: str = "store") -> S3Store:
        return S3Store(f"{self.bucket}-{name}", PREFIX, connect=self.client)

    def arguments(self, name: str = "store") -> list[str]:
        return [f"{self.bucket}-{name}", self.server.address]

    def place(self, name: str, store: str = "store") -> Path:
        return self._node().place(f"{self.bucket}-{store}", PREFIX + OBJECTS + name)

    def marker(self, store: str = "store") -> Path:
        return self._node().place(f"{self.bucket}-{store}", PREFIX + MARKER)

    def incoming(self, store: str = "store") -> int:
        return len(self.client().list_multipart_uploads(Bucket=f"{self.bucket}-{store}").get("Uploads", []))

    def aged(self, name: str, store: str = "store") -> None:
        _aged(self.place(name, store))

    def aged_incoming(self, store: str = "store") -> None:
        for left in self._node().place(f"{self.bucket}-{store}", "").rglob("*"):
            _aged(left)

    def client(self, seen: Callable[..., None] | None = None, event: str = "before-send.s3") -> S3Client:
        """A client of the server; `seen` is told of each of these events."""
        return client(self.server.address, seen, event)

    def _node(self) -> S3Server:
        if self.server.node is None:
            pytest.skip("the files of a server that is not ours cannot be aged or damaged")
        return self.server.node


def client(
    address: str, seen: Callable[..., None] | None = None, event: str = "before-send.s3", *, read_timeout: float = 60.0
) -> S3Client:
    """A client of the server at this address, which tries everything once."""
    parts = urlsplit(address)
    with MAKING:
        made = cast(
            "S3Client",
            cast(Any, SESSION).client(
                "s3",
                endpoint_url=f"http://{parts.hostname}:{parts.port}",
                aws_access_key_id=parts.username,
                aws_secret_access_key=parts.password,
                region_name="us-east-1",
                config=Config(connect_timeout=10, read_timeout=read_timeout, retries={"total_max_attempts": 1}),
            ),
        )
    if seen is not None:
        made.meta.events.register(event, seen)
    return made
