"""Immutable objects in a folder: written under a temporary name, synced, renamed to the sha256 of their content, synced.

<folder>/.fencepost-store       the identity of the store
<folder>/.incoming/             what is being written
<folder>/ab/abcdef...           objects
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fencepost.jobs.objects import Stored
from fencepost.schemas.errors import ConfigError, Damaged, InvalidInput, ObjectGone

__all__ = ["FileStore"]

MARKER = ".fencepost-store"
INCOMING = ".incoming"
CHUNK_BYTES = 1 << 20
NAME = re.compile(r"[0-9a-f]{64}")


class FileStore:
    """Durable objects in a folder of a local file system, or of one whose rename is atomic and whose fsync is honest.

    Opens a store that `create` has made, and raises ConfigError for any other folder: the mount point of a volume that is
    not mounted is not a new store.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)
        try:
            identity = (self._folder / MARKER).read_text("ascii").strip()
        except OSError as error:
            raise ConfigError(
                "the folder holds no object store",
                field="folder",
                hint="mount it, or make a new one with FileStore.create",
            ) from error
        if re.fullmatch(r"file:[0-9a-f-]{36}", identity) is None:
            raise ConfigError(
                "the marker of the object store is not readable", field="folder", hint=f"look at {MARKER}"
            )
        self._identity = identity

    @classmethod
    def create(cls, folder: Path) -> FileStore:
        """Makes the folder a store, once: two that do so at a time open the same one; existing objects stay."""
        folder = Path(folder)
        (folder / INCOMING).mkdir(parents=True, exist_ok=True)
        made = folder / INCOMING / uuid.uuid4().hex
        _write(made, io.BytesIO(f"file:{uuid.uuid4()}\n".encode()))
        with contextlib.suppress(FileExistsError):
            os.link(made, folder / MARKER)
        made.unlink()
        for each in (folder, folder.absolute().parent):
            _sync(each)
        return cls(folder)

    @property
    def identity(self) -> str:
        """``file:`` and the UUID that the store was made with."""
        return self._identity

    def put(self, data: bytes | BinaryIO) -> Stored:
        """Durable once it returns, whole or not at all; the same content again is the same object, and young again.

        ``data``: the content, or a binary file that is read to its end. Raises OSError when it cannot be stored.

        Crash here: [M] what was written stays under a temporary name, or as an object that nothing references; both are
        removed when they are old.
        """
        made = self._folder / INCOMING / uuid.uuid4().hex
        try:
            name, size = _write(made, io.BytesIO(data) if isinstance(data, bytes) else data)
            place = self._path(name)
            with contextlib.suppress(FileExistsError):
                place.parent.mkdir()
                _sync(self._folder)
            # Never "it is there already": who put it may have died before its directory was synced.
            made.replace(place)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
        _sync(place.parent)
        return Stored(self._identity, name, size)

    def age(self, name: str) -> float | None:
        """Seconds since it was last put, by this machine's clock; None when it is not there."""
        try:
            return _age(self._path(name).stat())
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes:
        """The content; Damaged when it does not have this name, ObjectGone when it is not there."""
        try:
            content = self._path(name).read_bytes()
        except FileNotFoundError:
            raise ObjectGone("the object is not in its store", field="object", hint="put it again") from None
        if hashlib.sha256(content).hexdigest() != name:
            raise Damaged("the content of the object is not what its name says", field="object", hint="put it again")
        return content

    def names(self) -> Iterator[tuple[str, float]]:
        """Name and age of every object."""
        for folder in sorted(self._folder.iterdir()):
            if len(folder.name) == 2 and folder.is_dir():
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if NAME.fullmatch(entry.name) is not None:
                            with contextlib.suppress(FileNotFoundError):
                                yield entry.name, _age(entry.stat())

    def delete(self, name: str) -> None:
        """Durably gone once it returns."""
        place = self._path(name)
        with contextlib.suppress(FileNotFoundError):
            place.unlink()
            _sync(place.parent)

    def tidy(self, older_than: float) -> int:
        """Removes temporary files older than so many seconds; returns how many."""
        removed = 0
        for left in (self._folder / INCOMING).iterdir():
            with contextlib.suppress(FileNotFoundError):
                if _age(left.stat()) > older_than:
                    left.unlink()
                    removed += 1
        return removed

    def _path(self, name: str) -> Path:
        if NAME.fullmatch(name) is None:
            raise InvalidInput("not the name of an object", field="object", hint="pass what put returned")
        return self._folder / name[:2] / name


def _write(path: Path, source: BinaryIO) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640), "wb") as file:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest(), size


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _age(found: os.stat_result) -> float:
    return max(0.0, time.time() - found.st_mtime)
