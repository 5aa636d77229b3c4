"""Signals: the first SIGTERM or SIGINT asks for a drain, the second leaves at once; nothing is lost by either."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

__all__ = ["draining"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)
JOIN_SECONDS = 5.0
log = logging.getLogger("fencepost")


@contextmanager
def draining(stop: Callable[[], None]) -> Generator[None]:
    """While the block runs, the first signal has `stop` called, the second ends the process with 128 + its number.

    `stop` is called in a thread of its own, so that it may take locks which the interrupted main thread holds.

    Crash here: [X] the second signal is a crash like any other: what was not recorded is done again by whoever comes.
    """
    asked = False
    # Invariant: the handler takes no lock but this queue's, whose `put` may interrupt itself.
    heard: SimpleQueue[int] = SimpleQueue()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)
        asked = True
        heard.put(number)

    def forward() -> None:
        if number := heard.get():
            stop()
            log.warning("%s: draining; a second signal leaves at once", signal.Signals(number).name)

    forwarder = threading.Thread(target=forward, name="signals", daemon=True)
    forwarder.start()
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        # Who was asked to end ends: until all threads are joined a second signal is answered as before it. The very last
        # steps have no handlers in Python, and nothing is left there that could last: they are not disturbed.
        if asked:
            atexit.register(_undisturbed)
        else:
            for number, handler in before.items():
                signal.signal(number, handler)
        heard.put(0)
        forwarder.join(JOIN_SECONDS)


def _undisturbed() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
