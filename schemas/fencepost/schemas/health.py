"""A tiny server for `/livez`, `/readyz` and `/metrics`, on a thread of its own that never waits for anything but its client.

| path | 200 | 503 |
|---|---|---|
| `/livez` | every loop moves | one stands still: restart the process |
| `/readyz` | everything that the work needs is there | the JSON body says what is missing; a restart does not help |
| `/metrics` | Prometheus text, with the extra `metrics` | – |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

from fencepost.schemas.errors import ConfigError
from fencepost.schemas.loopback import is_loopback

__all__ = ["STALLED_SECONDS", "Answer", "HealthAddress", "HealthServer", "answers"]

REQUEST_SECONDS = 2.0
CONNECTIONS_MAX = 32
HEAD_BYTES = 8192
STALLED_SECONDS = 60.0
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    501: "Not Implemented",
    503: "Service Unavailable",
}

log = logging.getLogger("fencepost.schemas.health")


class Answer(NamedTuple):
    """What one path says now."""

    status: int
    content_type: str
    body: bytes


class HealthAddress(NamedTuple):
    """Where the server listens; port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, exposed: bool = False) -> HealthAddress:
        """From `host:port`; ConfigError when it is neither, or off loopback without `exposed`: it asks nobody who they are."""
        host, colon, port = text.rpartition(":")
        bare = host.strip("[]")
        if not colon or not bare or not port.isascii() or not port.isdigit() or int(port) > 65_535:
            raise ConfigError("not host:port", field="health_address", hint="example: 127.0.0.1:8089, or off")
        if not exposed and not is_loopback(bare):
            raise ConfigError(
                "anybody in that network could ask",
                field="health_address",
                hint="listen on 127.0.0.1, or set health_exposed = true where the network is your own",
            )
        return cls(bare, int(port))


class HealthServer:
    """Answers GET and HEAD; at most 32 connections at once, two seconds and 8 KiB for each request, then it is dropped."""

    def __init__(self, address: HealthAddress, answer: Callable[[str], Answer | None]) -> None:
        self._address = address
        self._answer = answer
        self._open = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.port = 0

    def start(self) -> None:
        """Listens from now on; ConfigError when the address cannot be had."""
        family = socket.AF_INET6 if ":" in self._address.host else socket.AF_INET
        try:
            listener = socket.create_server(self._address, family=family, backlog=CONNECTIONS_MAX)
        except OSError as error:
            raise ConfigError(
                f"{self._address.host}:{self._address.port} cannot be listened on ({error.strerror})",
                field="health_address",
                hint="choose another port, or off",
            ) from None
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(listener,), name="fencepost-health", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends every connection and the thread, within a few seconds."""
        self._stopped = True
        loop, ending = self._loop, self._ending
        if loop is not None and ending is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ending.set)
        if self._thread is not None:
            self._thread.join(REQUEST_SECONDS + 1)

    def _run(self, listener: socket.socket) -> None:
        with listener:
            asyncio.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        self._ending = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._stopped:  # Before there was a loop to tell.
            return
        server = await asyncio.start_server(self._accepted, sock=listener, limit=HEAD_BYTES)
        try:
            await self._ending.wait()
        finally:
            server.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= CONNECTIONS_MAX:
                async with asyncio.timeout(REQUEST_SECONDS):
                    await self._exchange(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()
        finally:
            self._open -= 1
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path, _, version = rest.partition(" ")
        answer = self._answered(method, path, version)
        lines = [
            f"HTTP/1.1 {answer.status} {REASONS[answer.status]}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            "Cache-Control: no-store",
            "Connection: close",
            *(["Allow: GET, HEAD"] if answer.status == 405 else []),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if method != "HEAD":
            writer.write(answer.body)
        await writer.drain()

    def _answered(self, method: str, path: str, version: str) -> Answer:
        if not version.startswith("HTTP/1."):
            return Answer(400, TEXT, b"not a request\n")
        if method not in {"GET", "HEAD"}:
            return Answer(405, TEXT, b"GET or HEAD\n")
        try:
            found = self._answer(path.partition("?")[0])
        except Exception as error:  # noqa: BLE001 - one answer fails, not the server
            log.error("%s failed: %s", path.partition("?")[0][:50], type(error).__name__)
            return Answer(503, TEXT, b"failed\n")
        return found or Answer(404, TEXT, b"/livez, /readyz or /metrics\n")


def answers(
    moving: Callable[[], bool],
    readiness: Callable[[], tuple[bool, dict[str, object]]],
    metrics: Callable[[], tuple[str, bytes]] | None,
) -> Callable[[str], Answer | None]:
    """What the three paths say; `metrics` gives content type and text, None where the extra is not installed."""

    def answer(path: str) -> Answer | None:
        match path:
            case "/livez":
                alive = moving()
                return Answer(200 if alive else 503, TEXT, b"moving\n" if alive else b"standing still\n")
            case "/readyz":
                ready, document = readiness()
                body = json.dumps(document, ensure_ascii=False) + "\n"
                return Answer(200 if ready else 503, JSON, body.encode())
            case "/metrics":
                if metrics is None:
                    return Answer(501, TEXT, b"pip install 'fencepost[metrics]'\n")
                return Answer(200, *metrics())
            case _:
                return None

    return answer
