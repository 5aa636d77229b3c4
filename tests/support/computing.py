"""Functions for computations in processes of their own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


class Unfit(Exception):
    """Cannot be made anew from its arguments."""

    def __init__(self, number: int, *, text: str) -> None:
        super().__init__(number)
        self.text = text


def square(number: int) -> tuple[int, int]:
    """The square, and in which process."""
    return number * number, os.getpid()


def refuse(text: str) -> None:
    """Raises what can be sent back."""
    raise ValueError(text)


def unfit() -> None:
    """Raises what cannot."""
    raise Unfit(1, text="secret")


def lock() -> object:
    """Returns what cannot be sent back."""
    import threading

    return threading.Lock()


def die() -> None:
    """As native code does."""
    os.kill(os.getpid(), signal.SIGSEGV)


def told(path: str, seconds: float = 60.0) -> str:
    """Says which process this is, then takes its time."""
    Path(f"{path}.new").write_text(str(os.getpid()))
    Path(f"{path}.new").rename(path)
    time.sleep(seconds)
    return "late"
