"""What was released stays recorded: one file per type and version, in the user's repository, with every revision of its schema.

A file is JSON: type, version, and revisions, oldest first, each with the day it was recorded and its schema. Revisions
are added and never changed. Events of a revision may be around until a window after the next one was recorded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any, cast

from fencepost.schemas.compat import differences, same
from fencepost.schemas.content import JsonObject
from fencepost.schemas.envelope import wire_type
from fencepost.schemas.errors import ConfigError
from fencepost.schemas.event import Event
from fencepost.schemas.wire_schema import schema_of

__all__ = ["Broken", "Revision", "Snapshot", "Verdict", "compare", "load", "record"]

SUFFIX = ".json"
_NAME = re.compile(r".+\.v\d+\.json\Z")


@dataclass(frozen=True, slots=True)
class Revision:
    """The schema of a type and version from the day on which it was recorded."""

    recorded: date
    schema: JsonObject


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All revisions of one type and version, oldest first."""

    type: str
    version: int
    revisions: tuple[Revision, ...]

    @property
    def name(self) -> str:
        """The type on the wire, which is also the name of the file."""
        return wire_type(self.type, self.version)

    def within(self, window: timedelta | None, today: date) -> tuple[Revision, ...]:
        """The revisions of which events may still be around; all of them without a window."""
        if window is None:
            return self.revisions
        ended = [later.recorded for later in self.revisions[1:]]
        return (
            *(each for each, end in zip(self.revisions, ended, strict=False) if end >= today - window),
            self.revisions[-1],
        )


@dataclass(frozen=True, slots=True)
class Broken:
    """One incompatibility: the type on the wire, the member where it is one, what happened, and since which revision."""

    event: str
    field: str
    what: str
    recorded: date


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison found: what broke, and which types on the wire are new or changed compatibly."""

    broken: tuple[Broken, ...]
    unrecorded: tuple[str, ...]
    compared: int
    events: dict[str, type[Event]] = field(repr=False)


def load(folder: Path) -> dict[str, Snapshot]:
    """The snapshots in a folder by their type on the wire, or ConfigError naming the file; a missing folder has none.

    Files of other names are left alone.
    """
    found: dict[str, Snapshot] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if _NAME.match(path.name) is None:
            continue
        snapshot = _read(path)
        if path.name != snapshot.name + SUFFIX:
            raise ConfigError(f"{path} holds {snapshot.name}", field="snapshots", hint="a file is named after its type")
        found[snapshot.name] = snapshot
    return found


def compare(
    declared: Iterable[type[Event]], recorded: dict[str, Snapshot], *, window: timedelta | None, today: date
) -> Verdict:
    """Compares what is declared with every recorded revision inside the window, in both directions; writes nothing."""
    events = {wire_type(each.event_type, each.event_version): each for each in declared}
    broken: list[Broken] = []
    unrecorded: list[str] = []
    compared = 0
    for name, snapshot in recorded.items():
        if name not in events:
            broken.append(Broken(name, "", "is recorded but no longer declared", snapshot.revisions[-1].recorded))
    for name, cls in sorted(events.items()):
        schema = schema_of(cls)
        if name not in recorded:
            unrecorded.append(name)
            continue
        seen: set[tuple[str, str]] = set()
        for revision in reversed(recorded[name].within(window, today)):
            compared += 1
            for each in differences(revision.schema, schema):
                if (each.field, each.what) not in seen:
                    seen.add((each.field, each.what))
                    broken.append(Broken(name, each.field, each.what, revision.recorded))
        if not seen and not same(recorded[name].revisions[-1].schema, schema):
            unrecorded.append(name)
    return Verdict(tuple(broken), tuple(unrecorded), compared, events)


def record(folder: Path, recorded: dict[str, Snapshot], verdict: Verdict, today: date) -> list[Path]:
    """Adds a revision for everything unrecorded and gives the files written; the caller has seen that nothing broke."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name in verdict.unrecorded:
        cls = verdict.events[name]
        before = recorded[name].revisions if name in recorded else ()
        revisions = (*before, Revision(today, schema_of(cls)))
        path = folder / f"{name}{SUFFIX}"
        _write(path, Snapshot(cls.event_type, cls.event_version, revisions))
        written.append(path)
    return written


def _write(path: Path, snapshot: Snapshot) -> None:
    """As a whole or not at all."""
    document = {
        "type": snapshot.type,
        "version": snapshot.version,
        "revisions": [{"recorded": each.recorded.isoformat(), "schema": each.schema} for each in snapshot.revisions],
    }
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(beside, path)


def _read(path: Path) -> Snapshot:
    try:
        document = cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
        revisions = tuple(
            Revision(date.fromisoformat(each["recorded"]), cast(JsonObject, dict(each["schema"])))
            for each in document["revisions"]
        )
        snapshot = Snapshot(str(document["type"]), int(document["version"]), revisions)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(
            f"{path} is not a snapshot of a schema", field="snapshots", hint="restore it from the repository"
        ) from None
    days = [each.recorded for each in revisions]
    if not revisions or days != sorted(days):
        raise ConfigError(
            f"{path} has no revision, or not in the order of their days", field="snapshots", hint="restore it"
        )
    return snapshot
