"""What a relay's health server says, asked as a probe would ask."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fencepost.relay.sidecar import Relay
from support.processes import POLL_SECONDS, wait_for

LOOPBACK = "127.0.0.1"
ASK_SECONDS = 30.0
DROPPED = (ConnectionResetError, BrokenPipeError, http.client.IncompleteRead, TimeoutError)


class Said(NamedTuple):
    """One answer."""

    status: int
    content_type: str
    text: str

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return json.loads(self.text)


def ask(port: int, path: str, method: str = "GET", *, within: float = ASK_SECONDS) -> Said:
    """One answer; a request that the server drops, as it does after two seconds on a slow machine, is sent again."""
    deadline = time.monotonic() + within
    while True:
        try:
            return _ask_once(port, path, method)
        except DROPPED:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)


def _ask_once(port: int, path: str, method: str) -> Said:
    conn = http.client.HTTPConnection(LOOPBACK, port, timeout=ASK_SECONDS)
    try:
        conn.request(method, path)
        answer = conn.getresponse()
        return Said(answer.status, answer.getheader("Content-Type", ""), answer.read().decode())
    finally:
        conn.close()


@contextmanager
def running(relay: Relay) -> Generator[Relay]:
    """The relay at work in a thread, until the block ends; yields once health is served."""
    thread = threading.Thread(target=relay.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: relay.health_port > 0, 10, "health to be served")
        yield relay
    finally:
        relay.stop()
        thread.join(40)
        assert not thread.is_alive()


def readiness(relay: Relay) -> Any:
    """What `/readyz` says now."""
    return ask(relay.health_port, "/readyz").document


def becomes(relay: Relay, state: str, within: float = 30.0) -> Any:
    """The document of `/readyz`, once it has this state."""

    def found() -> Any:
        document = readiness(relay)
        return document if document["state"] == state else None

    return wait_for(found, within, f"/readyz to say {state}")


def metric(relay: Relay, line: str) -> float | None:
    """The value of one series, by its name and labels as they are printed."""
    for found in ask(relay.health_port, "/metrics").text.splitlines():
        if found.rpartition(" ")[0] == line:
            return float(found.rpartition(" ")[2])
    return None
