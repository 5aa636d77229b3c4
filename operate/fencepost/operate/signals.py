"""Signals: the first SIGTERM or SIGINT asks for a drain, the second leaves at once; nothing is lost by either."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

__all__ = ["draining"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)
log = logging.getLogger("fencepost")


@contextmanager
def draining(stop: Callable[[], None]) -> Generator[None]:
    """While the block runs, the first signal calls `stop`, the second ends the process with 128 + its number.

    Crash here: [X] the second signal is a crash like any other: what was not recorded is done again by whoever comes.
    """
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)
        asked = True
        stop()
        log.warning("%s: draining; a second signal leaves at once", signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
