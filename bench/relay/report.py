"""What was measured, beside its bounds, and the services that a run stands on."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stack.obtain import Obtained
from stack.process import Unavailable
from support.database import Database, Databases

SIZES = (200, 1024)
CLIENT = {"linger.ms": "2"}


@dataclass(slots=True)
class Report:
    """Lines as they are measured, and the bounds that were missed."""

    missed: list[str] = field(default_factory=list[str])

    def say(self, text: str) -> None:
        """One measured line."""
        print(text, flush=True)

    def bound(self, what: str, value: float, limit: float, *, least: bool, form: str = ".2f") -> None:
        """One measured value beside its bound."""
        fine = value >= limit if least else value <= limit
        sign = ">=" if least else "<="
        self.say(f"    {'holds ' if fine else 'MISSED'}  {what}: {value:{form}} ({sign} {limit:{form}})")
        if not fine:
            self.missed.append(what)


@dataclass(slots=True)
class Bench:
    """One run over services that were obtained once."""

    options: argparse.Namespace
    report: Report
    opened: contextlib.ExitStack
    databases: Databases

    def database(self) -> Database:
        """A database of its own."""
        made = self.databases.migrated()
        self.opened.callback(self.databases.drop, made)
        return made

    def service(self, name: str, obtain: Callable[[], Obtained[Any]]) -> str | None:
        """The address of a broker, or None with a loud line."""
        try:
            found = obtain()
        except Unavailable as error:
            self.report.say(f"NOT MEASURED, no {name}: {error}")
            self.report.missed.append(f"{name} is missing")
            return None
        self.opened.callback(found.close)
        self.report.say(f"to {found.label}")
        return found.address
