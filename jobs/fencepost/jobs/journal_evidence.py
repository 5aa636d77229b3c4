"""What a journal holds as evidence after a restore: every begin that may have been, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import UUID

from fencepost.jobs.journal_begins import BATCH, Begins
from fencepost.jobs.journal_records import Begin, NotBegun
from fencepost.jobs.journal_scan import Frame, require_sound, scan
from fencepost.schemas.errors import ConfigError

__all__ = ["Evidence"]


class Evidence:
    """One runner's journal: all begins but those that it knows were none, also what was acknowledged or settled since.

    ``epoch`` is the newest under which one of them was begun. Raises NewerFormat where a newer version wrote it, and ConfigError for
    a folder that holds no journal: a name that was mistyped is no empty journal.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._none: set[UUID] = set()
        self._until = 0
        self.epoch = 1
        report = scan(folder, self._first) if folder.is_dir() else None
        if report is not None and report.damage is not None and report.damage.kind == "newer":
            require_sound(report)
        if report is None or not report.segments:
            raise ConfigError(
                f"{folder} is no journal",
                field="journal",
                hint="name the folder of one worker's journal, the one with the .journal files",
            )
        self.damaged = report.damage is not None

    def each(self, take: Callable[[list[Begin]], None]) -> None:
        """Gives every begin to ``take`` once, at most a thousand at a time, as it was when this was made."""
        follow, batch = Begins(), list[Begin]()

        def second(frame: Frame) -> None:
            record = frame.record
            # A segment begins with a copy of what was unmatched at the end of the one before.
            new = isinstance(record, Begin) and record.effect_attempt not in follow.unmatched
            follow.take(frame)
            if (
                new
                and isinstance(record, Begin)
                and record.effect_attempt not in self._none
                and frame.seq <= self._until
            ):
                batch.append(record)
                if len(batch) == BATCH:
                    take(batch.copy())
                    batch.clear()

        scan(self.folder, second)
        if batch:
            take(batch)

    def _first(self, frame: Frame) -> None:
        self._until = frame.seq
        match frame.record:
            case NotBegun():
                self._none.add(frame.record.effect_attempt)
            case Begin():
                self.epoch = max(self.epoch, frame.record.epoch)
            case _:
                pass
