"""A TCP proxy on loopback that breaks connections the ways networks do."""

import contextlib
import socket
import struct
import threading
import time
from types import TracebackType
from typing import Self

LOOPBACK = "127.0.0.1"
PIECE = 65_536
MAX_LINKS = 256
TICK_SECONDS = 0.05


class Proxy:
    """Passes bytes to one target until told otherwise; every switch works on open and on new connections.

    A blackhole keeps reading nothing and closing nothing: the peer's TCP still acknowledges. Dropped replies are read
    from the server and thrown away, so that the server believes they were delivered.
    """

    def __init__(self, port: int, host: str = LOOPBACK) -> None:
        self._target = (host, port)
        self._listener = socket.create_server((LOOPBACK, 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._links: list[_Link] = []
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._refusing = False
        self.blackholed = threading.Event()
        self.dropping_replies = threading.Event()
        self.delay_seconds = 0.0
        self.dropped_bytes = 0

    def __enter__(self) -> Self:
        self._run(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def heal(self) -> None:
        """Passes everything again; a connection that lost bytes stays damaged, as in life."""
        self._refusing = False
        self.blackholed.clear()
        self.dropping_replies.clear()
        self.delay_seconds = 0.0

    def cut(self, *, reset: bool = False, refuse_new: bool = False) -> None:
        """Ends every open connection on both sides, in order or with RST; `refuse_new` ends later ones at once, too."""
        self._refusing = refuse_new
        with self._lock:
            links = list(self._links)
            self._links.clear()
        for link in links:
            link.end(reset=reset)

    def blackhole(self) -> None:
        """Nothing passes in either direction and nothing is closed, until `heal`."""
        self.blackholed.set()

    def delay(self, seconds: float) -> None:
        """Every piece waits this long before it is passed on."""
        self.delay_seconds = seconds

    def drop_replies(self) -> None:
        """What the client sends arrives; what the server answers is thrown away, until `heal`."""
        self.dropping_replies.set()

    @property
    def connections(self) -> int:
        """Number of connections passed at this moment."""
        with self._lock:
            return len(self._links)

    def close(self) -> None:
        """Ends everything; returns when all threads have."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(timeout=5)

    def _run(self, target: "object", *arguments: "object") -> None:
        assert callable(target)
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads = [known for known in self._threads if known.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing or self.connections >= MAX_LINKS:
                _Link(client, None).end(reset=True)
                continue
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                _Link(client, None).end(reset=True)
                continue
            link = _Link(client, server)
            for side in (client, server):
                side.settimeout(TICK_SECONDS)
            with self._lock:
                self._links.append(link)
            self._run(self._pass, link, client, server, False)
            self._run(self._pass, link, server, client, True)

    def _pass(self, link: "_Link", source: socket.socket, sink: socket.socket, replies: bool) -> None:
        try:
            while not self._closed.is_set() and not link.ended.is_set():
                if self.blackholed.is_set():
                    link.ended.wait(TICK_SECONDS)
                    continue
                try:
                    piece = source.recv(PIECE)
                except TimeoutError:
                    continue
                if not piece:
                    break
                if not self._hold(link):
                    break
                if replies and self.dropping_replies.is_set():
                    self.dropped_bytes += len(piece)
                    continue
                if not self._send(link, sink, piece):
                    break
        except OSError:
            pass
        finally:
            with self._lock:
                if link in self._links:
                    self._links.remove(link)
            link.end(reset=False)

    def _hold(self, link: "_Link") -> bool:
        """Waits out the delay, and a blackhole that began after the piece was read; False when the link ended."""
        until = time.monotonic() + self.delay_seconds
        while time.monotonic() < until or self.blackholed.is_set():
            if self._closed.is_set() or link.ended.wait(min(TICK_SECONDS, max(0.001, until - time.monotonic()))):
                return False
        return True

    def _send(self, link: "_Link", sink: socket.socket, piece: bytes) -> bool:
        left = memoryview(piece)
        while left:
            if self._closed.is_set() or link.ended.is_set():
                return False
            try:
                left = left[sink.send(left) :]
            except TimeoutError:
                continue
        return True


class _Link:
    """The two sockets of one passed connection."""

    def __init__(self, client: socket.socket, server: socket.socket | None) -> None:
        self._sides = [client] if server is None else [client, server]
        self._lock = threading.Lock()
        self.ended = threading.Event()

    def end(self, *, reset: bool) -> None:
        """Shuts down, then closes, both sides, once. Without the shutdown the peer would never hear of it."""
        with self._lock:
            if self.ended.is_set():
                return
            self.ended.set()
            for side in self._sides:
                with contextlib.suppress(OSError):
                    if reset:
                        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    else:
                        side.shutdown(socket.SHUT_RDWR)
                side.close()
