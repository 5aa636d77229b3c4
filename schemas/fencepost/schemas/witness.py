"""The authority record outside the database: a small file that no backup of the database brings back.

It keeps one (seq, nonce) pair, the head, and while a change is under way the pair that was intended. Every change goes
witness (intended), database (commit), witness (head), so that after a crash the database's tip is always one of the two.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast
from uuid import UUID, uuid4

from fencepost.schemas.errors import ConfigError, Damaged, NewerFormat, Unreachable

FORMAT = 1
"""What is written. Members may be added within it, where older versions may pass them over: they keep them."""
KNOWN = frozenset(
    {
        *("format", "installation", "system_identifier", "timeline", "database_oid"),
        *("head", "intended", "recovering", "restrictions"),
    }
)
HELD_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Mark:
    """One turn of the witness: a number that only grows, and a nonce that nobody can guess from it.

    ``epoch`` is the newest that was ever given to anybody; where a turn gives a new one, ``tenant`` says to whom (None: to
    everybody). A turn that is ``sealed`` was taken before a planned move of the database.
    """

    seq: int
    nonce: UUID
    epoch: int = 1
    tenant: str | None = None
    sealed: bool = False

    def following(self) -> Mark:
        """The next turn, under a fresh nonce and the same epoch."""
        return Mark(self.seq + 1, uuid4(), self.epoch)

    def rotating(self, tenant: str | None) -> Mark:
        """The next turn, which gives a tenant (or everybody) a new epoch."""
        return replace(self.following(), epoch=self.epoch + 1, tenant=tenant)

    def sealing(self) -> Mark:
        """The next turn, the last one before a planned move."""
        return replace(self.following(), sealed=True)


@dataclass(frozen=True, slots=True)
class Record:
    """What the witness remembers; `intended` is set exactly while a change may have reached the database.

    ``recovering`` is the turn of a recovery, in whatever database an operator has chosen: until it is found there, the head
    stands, and a recovery that failed has changed nothing. ``restrictions`` (``tenant:acme``, ``class:report``, ``principal:login``) are here too, so that no restore lifts them.
    """

    installation: UUID
    system_identifier: int
    timeline: int
    database_oid: int
    head: Mark
    intended: Mark | None = None
    restrictions: tuple[str, ...] = ()
    recovering: Mark | None = None
    others: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What a newer version has added; written again as it was."""

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The head, and every turn that may have been taken since."""
        return tuple(mark for mark in (self.head, self.intended, self.recovering) if mark is not None)

    @property
    def epoch(self) -> int:
        """The newest epoch that was ever given, or was about to be."""
        return max(mark.epoch for mark in self.marks)


class Witness(Protocol):
    """Where the record is kept: outside the database, and outside every backup of it."""

    @property
    def place(self) -> str:
        """Where that is, for people; without a password."""
        ...

    def exists(self) -> bool:
        """True when there is a witness to ask."""
        ...

    def held(self) -> AbstractContextManager[None]:
        """Exclusive use until the block ends or the process dies; `Unreachable` after ten seconds of waiting."""
        ...

    def read(self) -> Record:
        """The record; raises `ConfigError` when there is none, `Damaged` when it cannot be read, `NewerFormat`, `Unreachable`."""
        ...

    def write(self, record: Record) -> None:
        """Replaces the record, durably; call it while held."""
        ...


class FileWitness:
    """Survives anything that happens to the database; every write is complete, fsynced and atomic or did not happen.

    One writer at a time: `held()` takes an exclusive lock on a file beside it. Keep the folder out of the data directory
    and out of every backup of it.
    """

    def __init__(self, state: Path) -> None:
        self.path = state / "witness.json"
        self._lock = state / "witness.lock"

    @property
    def place(self) -> str:
        """The file."""
        return str(self.path)

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
                hint="point it to the folder that `fencepost migrate` created; where it is lost: authority recover --epoch-floor",
            ) from None
        try:
            return load(json.loads(raw))
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(
                f"the witness at {self.path} cannot be read",
                field="FENCEPOST_STATE",
                hint="restore nothing over it; it takes authority recover --epoch-floor",
            ) from error

    def write(self, record: Record) -> None:
        """Replaces the record, durably."""
        temporary = self.path.with_suffix(".new")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(dump(record), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def intend(witness: Witness, record: Record, mark: Mark) -> Record:
    """Notes the turn that the database is about to take."""
    intended = replace(record, intended=mark)
    witness.write(intended)
    return intended


def confirm(witness: Witness, record: Record, mark: Mark) -> Record:
    """Notes the turn that the database has taken."""
    confirmed = replace(record, head=mark, intended=None)
    witness.write(confirmed)
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


def dump(record: Record) -> dict[str, Any]:
    """The record as JSON."""

    def mark(m: Mark | None) -> dict[str, Any] | None:
        return None if m is None else asdict(m) | {"nonce": str(m.nonce)}

    return {
        **record.others,
        "format": FORMAT,
        "installation": str(record.installation),
        "system_identifier": record.system_identifier,
        "timeline": record.timeline,
        "database_oid": record.database_oid,
        "head": mark(record.head),
        "intended": mark(record.intended),
        "restrictions": list(record.restrictions),
        "recovering": mark(record.recovering),
    }


def load(value: Any) -> Record:
    """The record that `dump` made; ValueError, KeyError or TypeError when it did not, NewerFormat when a newer one did."""

    def mark(m: dict[str, Any]) -> Mark:
        seq, tenant = int(m["seq"]), m.get("tenant")
        return Mark(
            seq,
            UUID(m["nonce"]),
            int(m.get("epoch", 1)),
            None if tenant is None else str(tenant),
            bool(m.get("sealed", False)),
        )

    found = cast(dict[str, Any], value)
    if isinstance(found["format"], int) and found["format"] > FORMAT:
        raise NewerFormat(
            f"the witness has format {found['format']}, and this version reads {FORMAT}",
            field="FENCEPOST_STATE",
            hint="use the version of fencepost that wrote it, or a newer one; do not remove it",
        )
    if found["format"] != FORMAT:
        raise ValueError(found["format"])
    return Record(
        installation=UUID(found["installation"]),
        system_identifier=int(found["system_identifier"]),
        timeline=int(found["timeline"]),
        database_oid=int(found["database_oid"]),
        head=mark(found["head"]),
        intended=None if found["intended"] is None else mark(found["intended"]),
        restrictions=tuple(str(r) for r in found.get("restrictions", ())),
        recovering=None if found.get("recovering") is None else mark(found["recovering"]),
        others={name: value for name, value in found.items() if name not in KNOWN},
    )
