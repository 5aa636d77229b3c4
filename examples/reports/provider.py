"""A provider as they are: it sells summaries, keeps a ledger of what it accepted, and does not always answer.

It does not look for repeated requests: sent twice is accepted twice, and the ledger shows it. Run it with
`python examples/reports/provider.py --port 8099 --ledger ledger.jsonl`; it prints its port.

    POST /summaries                 Idempotency-Key; behaves as planned for the operation, else answers
    GET  /summaries/<key>           receipt look-up: 200 with the receipt, or 404
    GET  /style/<operation>         a read without any effect; may be held
    PUT  /behaviour/<operation>     {"summaries": ["drop", ...], "style": ["hold", ...]}, one for each coming request
    GET  /held, POST /release       what is held now; lets the oldest go on
    GET  /ledger, GET /requests     what was accepted; how often each operation was asked for
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
from collections import Counter, deque
from enum import StrEnum
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, assert_never, cast

HOLD_SECONDS = 60.0
BODY_MAX = 1 << 20


class Behaviour(StrEnum):
    """answer: accepts and answers. drop: accepts, then cuts the line. refuse: a definite no, nothing accepted.
    fail: status 500, nothing accepted. hang: neither accepts nor answers. hold: answers once it is released."""

    ANSWER = "answer"
    DROP = "drop"
    REFUSE = "refuse"
    FAIL = "fail"
    HANG = "hang"
    HOLD = "hold"


class Ledger:
    """Append-only and on disk before the answer: one line for every accepted request."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._file = open(path, "a+b")  # noqa: SIM115 - open for the life of the process
        self._file.seek(0)
        self._entries: list[dict[str, str]] = [json.loads(line) for line in self._file]

    def accept(self, key: str, operation: str) -> str:
        """Writes the acceptance down and returns its receipt."""
        with self._lock:
            entry = {"receipt": f"rcpt-{len(self._entries) + 1:06d}", "key": key, "operation": operation}
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._entries.append(entry)
            return entry["receipt"]

    def entries(self) -> list[dict[str, str]]:
        """Everything accepted so far."""
        with self._lock:
            return list(self._entries)


class Desk:
    """What is planned for which operation, what is held, and what was asked."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._lock = threading.Lock()
        self._plans: dict[tuple[str, str], deque[Behaviour]] = {}
        self._held: list[tuple[str, threading.Event]] = []
        self._requests: Counter[str] = Counter()

    def plan(self, operation: str, what: str, behaviours: list[str]) -> None:
        """The next requests for this operation behave like this, in turn; later ones answer."""
        with self._lock:
            self._plans[operation, what] = deque(Behaviour(b) for b in behaviours)

    def next(self, operation: str, what: str) -> Behaviour:
        """How the request that has just come behaves."""
        with self._lock:
            if what == "summaries":
                self._requests[operation] += 1
            planned = self._plans.get((operation, what))
            return planned.popleft() if planned else Behaviour.ANSWER

    def hold(self, operation: str) -> bool:
        """Waits until released, a minute at most."""
        go_on = threading.Event()
        with self._lock:
            self._held.append((operation, go_on))
        return go_on.wait(HOLD_SECONDS)

    def held(self) -> list[str]:
        """Operations whose requests are held, the oldest first."""
        with self._lock:
            return [operation for operation, _ in self._held]

    def release(self) -> None:
        """Lets the oldest held request go on."""
        with self._lock:
            if self._held:
                self._held.pop(0)[1].set()

    def requests(self) -> dict[str, int]:
        """How many summaries were asked for, by operation."""
        with self._lock:
            return dict(self._requests)


def summarise(text: str) -> str:
    """The two sentences that share the most words with the whole text, in their order."""
    sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+|\n\s*\n", text) if len(s.split()) >= 6][:400]
    weights = Counter(w for w in re.findall(r"[a-z]{5,}", text.lower()))
    best = sorted(range(len(sentences)), key=lambda i: -_weight(sentences[i], weights))[:2]
    return " ".join(" ".join(sentences[i].split())[:300] for i in sorted(best))


def _weight(sentence: str, weights: Counter[str]) -> float:
    words = set(re.findall(r"[a-z]{5,}", sentence.lower()))
    return sum(weights[w] for w in words) / (10 + len(words))


class Handler(BaseHTTPRequestHandler):
    """One request; every one in a thread of its own."""

    protocol_version = "HTTP/1.1"

    @property
    def desk(self) -> Desk:
        """The server's state."""
        return cast(Server, self.server).desk

    def do_GET(self) -> None:
        """Look-ups and reads; nothing is accepted by them."""
        match self.path.split("/")[1:]:
            case ["summaries", key]:
                found = next((e for e in self.desk.ledger.entries() if e["key"] == key), None)
                if found is None:
                    self._answer(HTTPStatus.NOT_FOUND, {"error": "nothing was accepted under this key"})
                else:
                    self._answer(HTTPStatus.OK, found)
            case ["style", operation]:
                if self.desk.next(operation, "style") is Behaviour.HOLD:
                    self.desk.hold(operation)
                self._answer(HTTPStatus.OK, {"prefix": "Summary: "})
            case ["held"]:
                self._answer(HTTPStatus.OK, self.desk.held())
            case ["ledger"]:
                self._answer(HTTPStatus.OK, self.desk.ledger.entries())
            case ["requests"]:
                self._answer(HTTPStatus.OK, self.desk.requests())
            case ["health"]:
                self._answer(HTTPStatus.OK, {"provider": "reports"})
            case _:
                self._answer(HTTPStatus.NOT_FOUND, {"error": "no such place"})

    def do_PUT(self) -> None:
        """Plans a behaviour."""
        match self.path.split("/")[1:]:
            case ["behaviour", operation]:
                for what, behaviours in self._body().items():
                    self.desk.plan(operation, what, behaviours)
                self._answer(HTTPStatus.OK, {"planned": operation})
            case _:
                self._answer(HTTPStatus.NOT_FOUND, {"error": "no such place"})

    def do_POST(self) -> None:
        """The one request with an effect, and the release of held ones."""
        if self.path == "/release":
            self.desk.release()
            self._answer(HTTPStatus.OK, {"held": self.desk.held()})
        elif self.path == "/summaries":
            self._summary(self._body())
        else:
            self._answer(HTTPStatus.NOT_FOUND, {"error": "no such place"})

    def _summary(self, request: dict[str, Any]) -> None:
        operation, key = str(request["operation"]), self.headers.get("Idempotency-Key", "")
        match self.desk.next(operation, "summaries"):
            case Behaviour.ANSWER | Behaviour.HOLD:
                receipt = self.desk.ledger.accept(key, operation)
                self._answer(HTTPStatus.CREATED, {"receipt": receipt, "summary": summarise(str(request["text"]))})
            case Behaviour.DROP:
                self.desk.ledger.accept(key, operation)
                self.close_connection = True
                self.connection.close()
            case Behaviour.REFUSE:
                self._answer(HTTPStatus.UNPROCESSABLE_ENTITY, {"error": "not today; nothing was accepted"})
            case Behaviour.FAIL:
                self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "something broke"})
            case Behaviour.HANG:
                threading.Event().wait(HOLD_SECONDS)
                self.close_connection = True
            case _ as never:
                assert_never(never)

    def _body(self) -> dict[str, Any]:
        size = min(int(self.headers.get("Content-Length", "0")), BODY_MAX)
        return cast(dict[str, Any], json.loads(self.rfile.read(size) or b"{}"))

    def _answer(self, status: HTTPStatus, value: object) -> None:
        raw = json.dumps(value).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)
        except OSError:
            # Whoever asked is gone; what was accepted stays accepted.
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are counted, not logged."""


class Server(ThreadingHTTPServer):
    """On loopback only."""

    daemon_threads = True

    def __init__(self, port: int, desk: Desk) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.desk = desk

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A broken request is the client's affair."""


def main() -> None:
    """Serves until SIGTERM."""
    arguments = argparse.ArgumentParser(description="a provider of summaries with a ledger")
    arguments.add_argument("--port", type=int, default=0)
    arguments.add_argument("--ledger", type=Path, required=True)
    chosen = arguments.parse_args()
    server = Server(chosen.port, Desk(Ledger(chosen.ledger)))
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    sys.stdout.write(f"port {server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
