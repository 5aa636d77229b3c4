"""Reading a journal: the verified prefix, and what the first thing is that does not verify.

    what is seen first                                              newest segment, not closed   elsewhere
    the file ends inside its header                                 torn                         corrupt
    the file ends inside a frame                                    torn                         corrupt
    only zeros from the end of a frame on                           torn                         corrupt
    the last frame does not verify and has a sector of zeros        torn                         corrupt
    a header of a version that is not read here yet                 newer                        newer
    anything else: bytes, order, a segment missing or foreign       corrupt                      corrupt

Torn is what an interrupted write can leave. A segment that was closed or rotated ends with a record that says so, and
its state byte is off: a cut there, even between two records, is corruption. Nothing behind the first damage is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import UUID

from fencepost.jobs import journal_format as form
from fencepost.jobs.journal_records import Closed, Record, Rotated, decode
from fencepost.schemas.errors import ConfigError, JournalCorrupt, JournalForeign, JournalTorn, NewerFormat

__all__ = ["Damage", "Frame", "Report", "Segment", "Take", "require_sound", "require_writable", "scan", "segment_path"]

NAME = re.compile(r"[0-9]{8}\.journal")
QUARANTINED = re.compile(r"[0-9]{8}\.journal\.quarantine-[0-9]+(-[0-9]+)?")
SECTOR = 512


@dataclass(frozen=True, slots=True)
class Damage:
    """Where a journal stops verifying, and why; ``torn`` only when an interrupted write explains it.

    ``newer`` is no damage at all: a newer version wrote the segment, and reads it.
    """

    kind: Literal["torn", "corrupt", "newer"]
    segment: str
    offset: int
    why: str


@dataclass(frozen=True, slots=True)
class Frame:
    """One verified record."""

    seq: int
    segment: str
    offset: int
    record: Record


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as far as it verifies: ``end`` is where the next frame would go, ``crc`` what it would chain from.

    ``next_seq`` is None where the frames were not read.
    """

    path: Path
    header: form.Header | None
    online: bool
    size: int
    end: int
    records: int
    next_seq: int | None
    crc: int
    last: type[Record] | None
    digest: bytes
    damage: Damage | None


@dataclass(frozen=True, slots=True)
class Report:
    """What a scan found: the segments up to the first damage, and the damage."""

    folder: Path
    segments: tuple[Segment, ...]
    damage: Damage | None
    quarantined: tuple[str, ...]
    foreign: bool
    """Some segment was written on another machine than this one."""

    @property
    def last(self) -> Segment | None:
        """The newest segment that was looked at."""
        return self.segments[-1] if self.segments else None

    @property
    def records(self) -> int:
        """How many records verify."""
        return sum(segment.records for segment in self.segments)


Take = Callable[[Frame], None]


def segment_path(folder: Path, number: int) -> Path:
    """The file of this segment."""
    return folder / f"{number:08}.journal"


def scan(folder: Path, take: Take | None = None, *, machine: UUID | None = None, newest: int | None = None) -> Report:
    """Reads every segment in order and gives every verified record to ``take``; changes nothing, needs no lock.

    With ``newest`` only the records of so many segments are read; those before are verified by the digests in the
    headers after them. ``machine`` is this machine's, None where it is not known. A folder without a segment is an empty
    journal; ConfigError when the folder cannot be read.
    """
    try:
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    except OSError as error:
        raise ConfigError(f"the journal's folder cannot be read: {error.strerror}", field="journal") from None
    paths = [folder / name for name in names if NAME.fullmatch(name)]
    quarantined = tuple(name for name in names if QUARANTINED.fullmatch(name))
    segments: list[Segment] = []
    damage: Damage | None = None
    for path in paths:
        whole = newest is None or path in paths[-newest:]
        segment = _segment(path, take, segments[-1] if segments else None, newest=path == paths[-1], whole=whole)
        segments.append(segment)
        damage = segment.damage
        if damage is not None:
            break
    headers = [segment.header for segment in segments if segment.header is not None]
    foreign = machine is not None and any(h.machine not in (machine, UUID(int=0)) for h in headers)
    return Report(folder, tuple(segments), damage, quarantined, foreign)


def require_sound(report: Report) -> None:
    """Raises JournalTorn, JournalCorrupt or NewerFormat, saying where and what to do."""
    damage = report.damage
    if damage is None:
        return
    where = f"{damage.segment} at byte {damage.offset} ({damage.why})"
    if damage.kind == "torn":
        raise JournalTorn(
            f"the journal ends in a write that was interrupted: {where}",
            field="journal",
            hint="what is before it verifies; run: fencepost journal repair",
        )
    if damage.kind == "newer":
        raise NewerFormat(
            f"{damage.segment} of the journal was written by a newer version",
            field="journal",
            hint="read it, and go on writing it, with that version of fencepost or a newer one",
        )
    raise JournalCorrupt(
        f"the journal does not verify: {where}",
        field="journal",
        hint="what is before it verifies (fencepost journal show); keep the folder as evidence, settle what is open, and "
        "give the worker a new one",
    )


def require_writable(report: Report) -> None:
    """As ``require_sound``; and raises JournalForeign for a journal of another machine."""
    require_sound(report)
    if report.foreign:
        raise JournalForeign(
            "the journal was written on another machine",
            field="journal",
            hint="a journal stays with its machine: give this worker a folder of its own",
        )


def _segment(path: Path, take: Take | None, before: Segment | None, *, newest: bool, whole: bool) -> Segment:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}", field="journal") from None
    walk = _Walk(path, data, newest=newest)
    header = walk.header(before)
    if header is not None and whole:
        walk.frames(take)
        walk.ending()
    return Segment(
        path=path,
        header=header,
        online=walk.online,
        size=len(data),
        end=walk.end,
        records=walk.records,
        next_seq=walk.seq if whole else None,
        crc=walk.crc,
        last=walk.last,
        digest=form.segment_digest(data),
        damage=walk.damage,
    )


class _Walk:
    """One pass over the bytes of a segment; stops at the first damage."""

    def __init__(self, path: Path, data: bytes, *, newest: bool) -> None:
        self._path = path
        self._data = data
        self._newest = newest
        self.online = data[form.STATE_AT : form.STATE_AT + 1] == bytes([form.ONLINE])
        self.offline = data[form.STATE_AT : form.STATE_AT + 1] == bytes([form.OFFLINE])
        self.end = 0
        self.records = 0
        self.seq = 0
        self.crc = 0
        self.last: type[Record] | None = None
        self.damage: Damage | None = None

    def header(self, before: Segment | None) -> form.Header | None:
        """The header, if it verifies and follows the segment before."""
        found = form.Header.decode(self._data)
        if isinstance(found, str):
            if found == "header_cut" and self._newest:
                self.damage = Damage("torn", self._path.name, 0, found)
            elif found == "newer":
                self.damage = Damage("newer", self._path.name, 0, found)
            else:
                self._corrupt(0, found)
            return None
        header, self.crc = found
        self.seq = header.first_seq
        number = 1 if before is None else int(before.path.stem) + 1
        why = ""
        if int(self._path.stem) != number:
            why = "segment_missing"
        elif header.number != number:
            why = "segment_of_another_place"
        elif header.previous != (form.NO_DIGEST if before is None else before.digest):
            why = "segment_does_not_follow"
        elif header.first_seq != 1 if before is None else before.next_seq not in (None, header.first_seq):
            why = "order"
        if why:
            self._corrupt(0, why)
            return None
        self.end = form.HEADER_SIZE
        return header

    def frames(self, take: Take | None) -> None:
        """Every frame that verifies."""
        data, size = self._data, len(self._data)
        while self.end < size:
            offset = self.end
            if size - offset < form.FRAME_SIZE:
                return self._interrupted("frame_cut")
            head = form.frame_head(data, offset)
            if head.length is None:
                return self._interrupted("zeros") if not any(data[offset:]) else self._corrupt(offset, "length")
            if not 0 < head.length <= form.PAYLOAD_BYTES_MAX:
                return self._corrupt(offset, "length")
            end = offset + form.frame_size(head.length)
            if end > size:
                return self._interrupted("frame_cut")
            body = offset + form.FRAME_SIZE
            payload = data[body : body + head.length]
            if form.checksum(payload, form.checksum(data[offset : body - 4])) != head.crc:
                if end == size and _has_zero_sector(data, offset, body + head.length):
                    return self._interrupted("sector_of_zeros")
                return self._corrupt(offset, "checksum")
            if any(data[body + head.length : end]):
                return self._corrupt(offset, "padding")
            if (head.seq, head.prev_crc) != (self.seq, self.crc):
                return self._corrupt(offset, "order")
            try:
                record = decode(payload)
            except ValueError:
                return self._corrupt(offset, "record")
            if take is not None:
                take(Frame(head.seq, self._path.name, offset, record))
            self.end, self.crc, self.seq = end, head.crc, head.seq + 1
            self.records += 1
            self.last = type(record)

    def ending(self) -> None:
        """Whether the segment may end here."""
        if self.damage is not None:
            return
        if not (self.online or self.offline):
            self._corrupt(form.STATE_AT, "state")
        elif self._newest and self.offline and self.last is Rotated:
            self._corrupt(self.end, "segment_missing")
        elif not self._newest and self.last is not Rotated or self.offline and self.last not in (Closed, Rotated):
            self._corrupt(self.end, "cut")

    def _interrupted(self, why: str) -> None:
        if self._newest and self.online:
            self.damage = Damage("torn", self._path.name, self.end, why)
        else:
            self._corrupt(self.end, why)

    def _corrupt(self, offset: int, why: str) -> None:
        self.damage = Damage("corrupt", self._path.name, offset, why)


def _has_zero_sector(data: bytes, start: int, end: int) -> bool:
    """Whether a sector's share of these bytes is nothing but zeros: no frame that was written whole has one."""
    at = start
    while at < end:
        until = min(end, (at // SECTOR + 1) * SECTOR)
        if not any(data[at:until]):
            return True
        at = until
    return False
