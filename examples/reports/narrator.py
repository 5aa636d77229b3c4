"""Tells what happens in plain words: coloured and live on a terminal, plain lines elsewhere. Every wait has an end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

__all__ = ["DemoFailed", "Narrator"]

T = TypeVar("T")
POLL_SECONDS = 0.05


class DemoFailed(Exception):
    """Something did not go as it must; the message says what was waited for and how it stands."""


class Narrator:
    """One voice for the whole demo, with the time since its start before every line."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._start = time.monotonic()
        self._act = 0
        self.alive: Callable[[], str | None] = lambda: None
        """What every wait asks: None, or which process ended although nobody asked it to."""

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def act(self, title: str) -> None:
        """A new part of the story."""
        self._act += 1
        self._line(f"\n{self._act}. {title}", "bold cyan")

    def say(self, words: str) -> None:
        """One line."""
        self._line(f"   {words}", "")

    def seen(self, words: str) -> None:
        """One line about something that was proved."""
        self._line(f" ✓ {words}" if self._unicode else f" + {words}", "green")

    def quote(self, words: str) -> None:
        """What a program printed."""
        for line in words.rstrip().splitlines():
            self._line(f"   | {line}", "dim")

    def failed(self, words: str) -> None:
        """One line about what went wrong."""
        self._line(f" ✗ {words}" if self._unicode else f" ! {words}", "bold red")

    def until(self, what: str, found: Callable[[], T | None], within: float) -> T:
        """The first value that is neither None nor False; DemoFailed naming `what` at the deadline."""
        deadline = time.monotonic() + within
        with self._spinner(what):
            while True:
                value = found()
                if value is not None and value is not False:
                    return value
                self._check(what)
                if time.monotonic() > deadline:
                    raise DemoFailed(f"waited {within:.0f} s in vain until {what}")
                time.sleep(POLL_SECONDS)

    def count(self, what: str, total: int, counted: Callable[[], int], within: float) -> None:
        """Waits until `counted()` has reached `total`, with a bar; DemoFailed says how far it came."""
        deadline = time.monotonic() + within
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn())
        with Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as shown:
            task = shown.add_task(what, total=total)
            while True:
                number = counted()
                shown.update(task, completed=min(number, total))
                if number >= total:
                    return
                self._check(what)
                if time.monotonic() > deadline:
                    raise DemoFailed(f"waited {within:.0f} s in vain until {what}: {number} of {total}")
                time.sleep(POLL_SECONDS)

    def _check(self, what: str) -> None:
        ended = self.alive()
        if ended is not None:
            raise DemoFailed(f"while waiting until {what}: {ended}")

    @contextmanager
    def _spinner(self, what: str) -> Generator[None]:
        if not self._console.is_terminal:
            yield
            return
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        ) as shown:
            shown.add_task(f"waiting until {what}")
            yield

    @property
    def _unicode(self) -> bool:
        return "utf" in (sys.stdout.encoding or "").lower()

    def _line(self, words: str, style: str) -> None:
        head = words[: len(words) - len(words.lstrip("\n"))]
        clock = f"{self.seconds:5.1f}s "
        self._console.print(Text.assemble(head, (clock, "dim"), (words.lstrip("\n"), style)))
        sys.stdout.flush()
