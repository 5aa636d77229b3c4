"""The port to a store of immutable objects, named by their content: what a manifest, and the removal of orphans, need.

`file_store` is the implementation for a file system, `s3_store` that for S3. Another one for an object storage service needs a
conditional write of the marker that holds its identity, and strongly consistent reads, writes and deletes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

__all__ = ["ObjectStore", "Stored"]


@dataclass(frozen=True, slots=True)
class Stored:
    """An object that is durable in a store: its name is the sha256 of its content, in hexadecimal."""

    store: str
    object: str
    size: int


class ObjectStore(Protocol):
    """Immutable objects; every method may be called from any thread."""

    @property
    def identity(self) -> str:
        """Which store this is: made once, kept inside the store itself, the same for everybody who opens it."""
        ...

    def put(self, data: bytes | BinaryIO) -> Stored:
        """Durable once it returns, whole or not at all; content that is there already stays, and is young again."""
        ...

    def age(self, name: str) -> float | None:
        """Seconds since it was last put, None when it is not there; reads what is there, never a cache."""
        ...

    def read(self, name: str) -> bytes:
        """The content, proven to have this name: Damaged otherwise. ObjectGone when it is not there."""
        ...

    def names(self) -> Iterator[tuple[str, float]]:
        """Name and age of every object, in any order; one that comes or goes meanwhile may be left out."""
        ...

    def delete(self, name: str) -> None:
        """Durably gone once it returns; no error when it was not there."""
        ...

    def tidy(self, older_than: float) -> int:
        """Removes what a put that was interrupted more than so many seconds ago left behind; returns how many."""
        ...
