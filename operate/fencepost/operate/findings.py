"""What a check found: a level and one line that says how it is and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Level", "fail", "ok", "warn"]


class Level(StrEnum):
    """ok: as it must be. warn: works, at a price that is named. fail: something is refused or not safe."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `doctor`."""

    check: str
    level: Level
    message: str


def ok(check: str, message: str) -> Finding:
    """As it must be."""
    return Finding(check, Level.OK, message)


def warn(check: str, message: str) -> Finding:
    """Works, at the price that the message names."""
    return Finding(check, Level.WARN, message)


def fail(check: str, message: str) -> Finding:
    """Must be changed; the message says how."""
    return Finding(check, Level.FAIL, message)
