"""A provider with a durable ledger, which answers well, badly, late or not at all, as the seed says for each request.

    POST /effects/<kind>     {"subject": ...}, Idempotency-Key; only kind keyed looks whether it knows the key
    GET  /receipts/<key>     200 with the receipt, or 404; now and then neither

One line of the ledger for each acceptance, on disk before anything is answered. A request that is not accepted within a
bounded time of its arrival never is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from bench.chaos.plan import LATE_SECONDS_LIMIT, LATE_SECONDS_MAX, chance

LOOPBACK = "127.0.0.1"
BODY_MAX = 1 << 16
HANG_SECONDS = 2.0

# What becomes of a request, with its share; the rest is accepted and answered.
BAD = (
    ("accepted, then reset", 0.05),
    ("accepted, then 500", 0.04),
    ("accepted, then garbage", 0.02),
    ("accepted, then cut short", 0.02),
    ("accepted, then 409", 0.01),
    ("accepted late", 0.04),
    ("reset", 0.03),
    ("503", 0.03),
    ("silence", 0.02),
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """One acceptance."""

    kind: str
    key: str
    subject: str
    receipt: str


class Ledger:
    """Append-only; an incomplete last line, which a kill may leave, was never answered and does not count."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        entries, size = read(path)
        self._file = open(path, "ab")  # noqa: SIM115 - open for the life of the process
        self._file.truncate(size)
        self._count = len(entries)
        self._receipts = {each.key: each.receipt for each in entries}

    def accept(self, kind: str, key: str, subject: str) -> str:
        """The receipt, written down before; of an earlier acceptance where the kind is keyed and the key known."""
        with self._lock:
            if kind == "keyed" and key in self._receipts:
                return self._receipts[key]
            self._count += 1
            made = Accepted(kind, key, subject, f"rcpt-{self._count:07d}")
            self._file.write(json.dumps(asdict(made)).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._receipts[key] = made.receipt
            return made.receipt

    def close(self) -> None:
        """Ends the writing."""
        self._file.close()

    def receipt(self, key: str) -> str | None:
        """What was accepted under this key last."""
        with self._lock:
            return self._receipts.get(key)


def read(path: Path) -> tuple[list[Accepted], int]:
    """Every acceptance, and the length of what is complete."""
    raw = path.read_bytes() if path.exists() else b""
    whole = raw[: raw.rfind(b"\n") + 1]
    return [Accepted(**json.loads(line)) for line in whole.splitlines()], len(whole)


class Handler(BaseHTTPRequestHandler):
    """One connection, in a thread of its own."""

    protocol_version = "HTTP/1.1"

    @property
    def desk(self) -> Server:
        """The server's state."""
        return cast(Server, self.server)

    def do_GET(self) -> None:
        """A look-up, which has no effect; one in twelve fails."""
        key = self.path.rpartition("/")[2]
        drawn = self.desk.drawn("look-up", key)
        if drawn < 0.03:
            time.sleep(LATE_SECONDS_MAX)
        elif drawn < 0.08:
            self._answer(503, b"{}")
            return
        found = self.desk.ledger.receipt(key)
        self._answer(404 if found is None else 200, json.dumps({"receipt": found}).encode())

    def do_POST(self) -> None:
        """A request with an effect."""
        arrived = time.monotonic()
        size = min(int(self.headers.get("Content-Length", "0")), BODY_MAX)
        body: dict[str, Any] = json.loads(self.rfile.read(size) or b"{}")
        kind, key, subject = self.path.rpartition("/")[2], self.headers.get("Idempotency-Key", ""), body["subject"]
        drawn = self.desk.drawn("effect", subject)
        what = ""
        for name, share in BAD:
            drawn -= share
            if drawn < 0:
                what = name
                break
        match what:
            case "reset":
                self._reset()
                return
            case "503":
                self._answer(503, b"{}")
                return
            case "silence":
                time.sleep(HANG_SECONDS)
                self._reset()
                return
            case "accepted late":
                time.sleep(0.2 + (LATE_SECONDS_MAX - 0.2) * chance(self.desk.seed, "late", subject, arrived))
            case _:
                pass
        if time.monotonic() - arrived > LATE_SECONDS_LIMIT:
            self._reset()
            return
        receipt = json.dumps({"receipt": self.desk.ledger.accept(kind, key, subject)}).encode()
        match what:
            case "accepted, then reset":
                self._reset()
            case "accepted, then 500":
                self._answer(500, b"{}")
            case "accepted, then 409":
                self._answer(409, b'{"error": "this key was used"}')
            case "accepted, then garbage":
                self._answer(201, b"<html>")
            case "accepted, then cut short":
                self._answer(201, receipt[:12], declared=len(receipt))
                self.close_connection = True
            case _:
                self._answer(201, receipt)

    def _answer(self, status: int, raw: bytes, *, declared: int | None = None) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw) if declared is None else declared))
            self.end_headers()
            self.wfile.write(raw)
        except OSError:
            # Whoever asked is gone; what was accepted stays accepted.
            self.close_connection = True

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        """The ledger is the log."""


class Server(ThreadingHTTPServer):
    """On loopback only."""

    daemon_threads = True
    request_queue_size = 256
    allow_reuse_address = True

    def __init__(self, port: int, ledger: Ledger, seed: int) -> None:
        super().__init__((LOOPBACK, port), Handler)
        self.ledger = ledger
        self.seed = seed
        self._lock = threading.Lock()
        self._asked: Counter[tuple[str, str]] = Counter()

    def drawn(self, what: str, about: str) -> float:
        """The decision about this request, another one each time."""
        with self._lock:
            self._asked[what, about] += 1
            return chance(self.seed, what, about, self._asked[what, about], os.getpid())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A broken connection is the client's affair."""


def main() -> None:
    """Serves until it is ended."""
    arguments = argparse.ArgumentParser(description="a provider with a ledger that answers as a seed says")
    arguments.add_argument("--port", type=int, required=True)
    arguments.add_argument("--ledger", type=Path, required=True)
    arguments.add_argument("--seed", type=int, required=True)
    chosen = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    server = Server(chosen.port, Ledger(chosen.ledger), chosen.seed)
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    server.serve_forever(poll_interval=0.1)


if __name__ == "__main__":
    main()
