"""The authority record outside the database: a small file that no backup of the database brings back.

It keeps one (seq, nonce) pair, the head, and while a change is under way the pair that was intended. Every change goes
witness (intended), database (commit), witness (head), so that after a crash the database's tip is always one of the two.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

from fencepost.schemas.errors import ConfigError, Damaged, Unreachable

FORMAT = 1
HELD_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Mark:
    """One turn of the witness: a number that only grows, and a nonce that nobody can guess from it."""

    seq: int
    nonce: UUID

    def following(self) -> Mark:
        """The next turn, under a fresh nonce."""
        return Mark(self.seq + 1, uuid4())


@dataclass(frozen=True, slots=True)
class Record:
    """What the witness remembers; `intended` is set exactly while a change may have reached the database."""

    installation: UUID
    system_identifier: int
    timeline: int
    database_oid: int
    head: Mark
    intended: Mark | None = None


class FileWitness:
    """Survives anything that happens to the database; every write is complete, fsynced and atomic or did not happen.

    One writer at a time: `held()` takes an exclusive lock on a file beside it. Keep the folder out of the data directory
    and out of every backup of it.
    """

    def __init__(self, state: Path) -> None:
        self.path = state / "witness.json"
        self._lock = state / "witness.lock"

    def exists(self) -> bool:
        """True when there is a witness to ask."""
        return self.path.exists()

    @contextmanager
    def held(self) -> Generator[None]:
        """Exclusive use of the witness by this process, until the block ends or the process dies.

        Waits at most ten seconds for another process that holds it, then raises `Unreachable`.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor, self.path)
            yield
        finally:
            os.close(descriptor)

    def read(self) -> Record:
        """The record; raises `ConfigError` when there is none, `Damaged` when it cannot be read."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            raise ConfigError(
                f"there is no witness at {self.path}",
                field="FENCEPOST_STATE",
                hint="point it to the folder that `fencepost migrate` created; a lost witness needs an operator's recovery",
            ) from None
        try:
            return _load(json.loads(raw))
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(
                f"the witness at {self.path} cannot be read",
                field="FENCEPOST_STATE",
                hint="restore nothing over it; it takes an operator's recovery",
            ) from error

    def write(self, record: Record) -> None:
        """Replaces the record, durably."""
        temporary = self.path.with_suffix(".new")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(_dump(record), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def intend(self, record: Record, mark: Mark) -> Record:
        """Notes the turn that the database is about to take."""
        intended = replace(record, intended=mark)
        self.write(intended)
        return intended

    def confirm(self, record: Record, mark: Mark) -> Record:
        """Notes the turn that the database has taken."""
        confirmed = replace(record, head=mark, intended=None)
        self.write(confirmed)
        return confirmed


def _lock(descriptor: int, path: Path) -> None:
    until = time.monotonic() + HELD_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise Unreachable(
                    f"the witness at {path} is held by another process",
                    field="FENCEPOST_STATE",
                    hint="a process that keeps it may be stopped in the middle; end it",
                ) from None
            time.sleep(0.02)


def _dump(record: Record) -> dict[str, Any]:
    def mark(m: Mark | None) -> dict[str, Any] | None:
        return None if m is None else {"seq": m.seq, "nonce": str(m.nonce)}

    return {
        "format": FORMAT,
        "installation": str(record.installation),
        "system_identifier": record.system_identifier,
        "timeline": record.timeline,
        "database_oid": record.database_oid,
        "head": mark(record.head),
        "intended": mark(record.intended),
    }


def _load(value: Any) -> Record:
    def mark(m: dict[str, Any]) -> Mark:
        return Mark(int(m["seq"]), UUID(m["nonce"]))

    found = cast(dict[str, Any], value)
    if found["format"] != FORMAT:
        raise ValueError(found["format"])
    return Record(
        installation=UUID(found["installation"]),
        system_identifier=int(found["system_identifier"]),
        timeline=int(found["timeline"]),
        database_oid=int(found["database_oid"]),
        head=mark(found["head"]),
        intended=None if found["intended"] is None else mark(found["intended"]),
    )
