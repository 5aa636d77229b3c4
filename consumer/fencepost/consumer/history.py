"""What a replay reads: records of partitions in their order, each with the place where it stands.

A Kafka topic has its partitions, the retained outbox is one partition. A place is an offset, or a number of the outbox;
positions are the next place to read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, Protocol

from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import InvalidInput, Undecodable

__all__ = ["BEGINNING", "END", "Batch", "Bound", "History", "Reach", "Record", "bound"]

BEGINNING, END = "beginning", "end"

Bound = str | int | datetime
"""`beginning` or `end`; a place; or a time with a zone. A range ends with its last place, or before its time."""


class Record(NamedTuple):
    """One event of the history, or why its envelope could not be read."""

    partition: int
    place: int
    found: Envelope | Undecodable

    def envelope(self) -> Envelope:
        """The envelope, or Undecodable."""
        if isinstance(self.found, Envelope):
            return self.found
        raise self.found


@dataclass(frozen=True, slots=True)
class Reach:
    """A partition's range: from `first` up to but without `last`, read up to but without `position`."""

    first: int
    position: int
    last: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Records in order, and the position of every partition behind them; `ends` of those that turned out shorter."""

    records: list[Record]
    positions: dict[int, int]
    ends: dict[int, int] = field(default_factory=dict[int, int])


class History(Protocol):
    """Where events are read from, without telling anyone that they were."""

    @property
    def range(self) -> str:
        """The range as it was asked for, to tell one build from another."""
        ...

    def open(self) -> str:
        """Reaches the history; its identity, which another history of the same name does not have, and its mark."""
        ...

    def resolve(self) -> dict[int, Reach]:
        """The range as places, for a replay that begins."""
        ...

    @property
    def mark(self) -> str:
        """What must be kept with the positions so that going on reads the same history; empty for none."""
        ...

    def read(self, reaches: Mapping[int, Reach], mark: str, stop: threading.Event) -> Iterator[Batch]:
        """Batches until every partition's range is read or `stop` is set."""
        ...

    def close(self) -> None:
        """Leaves the history."""
        ...


def bound(name: str, text: str) -> Bound:
    """What `--from` or `--to` says, or InvalidInput."""
    if text == (BEGINNING if name == "from" else END):
        return text
    if text.isascii() and text.isdigit() and int(text) < 2**63:
        return int(text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise InvalidInput(
            f"neither {BEGINNING if name == 'from' else END}, a number, nor a time with a zone",
            field=name,
            hint="example: 1200, or 2026-01-31T12:00:00Z",
        )
    return found
