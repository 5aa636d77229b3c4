"""A small HTTP provider that keeps a ledger of what it accepted, and answers well, badly or not at all."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

from fencepost.jobs.effects import Dispatch, Success
from fencepost.schemas.errors import NotDispatched

Mode = Literal[
    "answer",
    "drop-after-accept",
    "refuse-before-read",
    "error500",
    "hang",
    "garbage",
    "already-used",
    "too-many",
    "redirect",
    "truncated",
    "drip",
    "huge",
]
LOOPBACK = "127.0.0.1"
HANG_SECONDS = 20.0
DRIP_SECONDS = 0.02


class Provider:
    """Accepts POST /effects under an idempotency key; GET /receipts/<key> tells whether it did. `mode` may change."""

    def __init__(self, mode: Mode = "answer") -> None:
        self.mode: Mode = mode
        self.on_accept: Callable[[], None] | None = None
        self.released = threading.Event()
        self._lock = threading.Lock()
        self._accepted: list[tuple[str, bytes]] = []
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                provider._post(self)

            def do_GET(self) -> None:
                receipt = provider.receipt(self.path.rpartition("/")[2])
                _send(self, 404 if receipt is None else 200, json.dumps({"receipt": receipt}).encode())

            def log_message(self, format: str, *args: Any) -> None:
                """Tests read the ledger, not a log."""

        self._server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Where effects are posted."""
        return f"http://{LOOPBACK}:{self.port}/effects"

    @property
    def bodies(self) -> list[bytes]:
        """What was accepted, in the order of acceptance."""
        with self._lock:
            return [body for _, body in self._accepted]

    @property
    def accepted(self) -> list[str]:
        """The idempotency keys in the order of acceptance; one that is there twice was done twice."""
        with self._lock:
            return [key for key, _ in self._accepted]

    def receipt(self, key: str) -> str | None:
        """The receipt of what was accepted under this key."""
        return f"receipt-{key}" if key in self.accepted else None

    def _post(self, handler: BaseHTTPRequestHandler) -> None:
        mode = self.mode
        if mode == "refuse-before-read":
            _reset(handler.connection)
            return
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        key = handler.headers["Idempotency-Key"]
        with self._lock:
            self._accepted.append((key, body))
        if self.on_accept is not None:
            self.on_accept()
        match mode:
            case "answer":
                _send(handler, 200, json.dumps({"receipt": f"receipt-{key}"}).encode())
            case "drop-after-accept":
                _reset(handler.connection)
            case "error500":
                _send(handler, 500, b"{}")
            case "hang":
                self.released.wait(HANG_SECONDS)
                _send(handler, 200, json.dumps({"receipt": f"receipt-{key}"}).encode())
            case "garbage":
                _send(handler, 200, b"<html>")
            case "already-used":
                _send(handler, 409, b'{"error": "key already used"}')
            case "too-many":
                _send(handler, 429, b"{}")
            case "redirect":
                _send(handler, 307, b"", Location="/effects")
            case "truncated":
                _send(handler, 200, b'{"receipt": "rec', declared=100)
            case "drip":
                self._drip(handler)
            case "huge":
                _send(handler, 200, json.dumps({"receipt": "r", "more": "x" * 100_000}).encode())

    def _drip(self, handler: BaseHTTPRequestHandler) -> None:
        """Never silent, never done."""
        _send(handler, 200, b"{", declared=1_000_000)
        for _ in range(int(HANG_SECONDS / DRIP_SECONDS)):
            if self.released.wait(DRIP_SECONDS):
                return
            try:
                handler.wfile.write(b" ")
            except OSError:
                return


def _send(
    handler: BaseHTTPRequestHandler, status: int, body: bytes, *, declared: int | None = None, **headers: str
) -> None:
    try:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body) if declared is None else declared))
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)
    except OSError:
        handler.close_connection = True


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Client:
    """Calls the provider as an application would: no retries, and no interpretation of what went wrong."""

    def __init__(self, port: int) -> None:
        self.port = port

    def call(self, request: Any, dispatch: Dispatch) -> Success:
        """One POST within the time that is left; a Success only for a receipt that could be read."""
        conn = http.client.HTTPConnection(LOOPBACK, self.port, timeout=max(dispatch.seconds_left(), 0.01))
        try:
            conn.connect()
        except ConnectionRefusedError:
            raise NotDispatched("the provider refused the connection") from None
        try:
            headers = {"Idempotency-Key": dispatch.idempotency_key}
            conn.request("POST", "/effects", json.dumps(request), headers)
            with conn.getresponse() as answer:
                if answer.status != 200:
                    raise RuntimeError(f"status {answer.status}")
                return Success(json.loads(answer.read())["receipt"])
        finally:
            conn.close()

    def look_up(self, key: str) -> str | None:
        """The receipt under this key, or None."""
        conn = http.client.HTTPConnection(LOOPBACK, self.port, timeout=5)
        try:
            conn.request("GET", "/receipts/" + quote(key))
            with conn.getresponse() as answer:
                found: str | None = json.loads(answer.read())["receipt"]
                return found
        finally:
            conn.close()
