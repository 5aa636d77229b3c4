"""One connection to RabbitMQ: made within a deadline, one confirming channel per exchange, dropped without waiting."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import time
from collections.abc import Iterable
from typing import Any, cast

import aio_pika
import aiormq
from aio_pika.abc import AbstractChannel, AbstractConnection

LOGGER = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
CHANNEL_SECONDS = 5.0
LEAVE_SECONDS = 2.0
BACKOFF_FIRST_SECONDS = 0.1
BACKOFF_MAX_SECONDS = 2.0
CAREFUL_SECONDS = 60.0
EXCHANGES_MAX = 256


class Loop(asyncio.SelectorEventLoop):
    """An event loop that can drop its connections: a stopped broker never answers an orderly close."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: list[asyncio.BaseTransport] = []

    async def create_connection(self, *arguments: Any, **options: Any) -> Any:
        """As in asyncio; remembers the transport."""
        transport, protocol = await super().create_connection(*arguments, **options)
        self._opened = [known for known in self._opened if not known.is_closing()]
        self._opened.append(transport)
        return transport, protocol

    @property
    def opened(self) -> list[asyncio.BaseTransport]:
        """The transports that are open, oldest first."""
        return [known for known in self._opened if not known.is_closing()]

    def drop_connections(self) -> None:
        """Ends every connection at once; what was buffered is lost."""
        abort(self._opened)
        self._opened.clear()


def abort(transports: Iterable[asyncio.BaseTransport]) -> None:
    """Ends connections without a word to the broker."""
    for transport in transports:
        if isinstance(transport, asyncio.WriteTransport):
            transport.abort()


class Line:
    """The channel of one exchange. Nothing else uses it, so when the broker closes it, this exchange is to blame."""

    __slots__ = ("careful", "channel", "checked", "in_flight", "lost", "opening", "room", "under")

    def __init__(self) -> None:
        self.channel: AbstractChannel | None = None
        self.under: aiormq.Channel | None = None
        self.checked = 0.0
        self.careful = 0.0
        self.in_flight = 0
        # Invariant: true while an event without an answer may still be on this channel; then nobody can be blamed.
        self.lost = False
        self.opening = asyncio.Lock()
        self.room = asyncio.Lock()

    @property
    def alone(self) -> bool:
        """Whether events of this exchange go one at a time, to find out which of them the broker refuses."""
        return time.monotonic() < self.careful


class NoSuchExchange(Exception):
    """The broker said so on a channel that asked for nothing else."""


class Link:
    """Connects when asked, at most once at a time, and again after a failure not before a short, growing pause."""

    def __init__(self, loop: Loop, url: str, context: ssl.SSLContext | None, recheck: float) -> None:
        self._loop = loop
        self._url = url
        self._context = context
        self._recheck = recheck
        self._connection: AbstractConnection | None = None
        self._connecting: asyncio.Task[AbstractConnection] | None = None
        self._not_before = 0.0
        self._backoff = BACKOFF_FIRST_SECONDS
        self._lines: dict[str, Line] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    async def connection(self) -> AbstractConnection:
        """The open connection; raises what connecting raised. Bound it with a deadline of your own."""
        found = self._connection
        # aio-pika's `is_closed` speaks of our own close only; `connected` is cleared when the broker ends it.
        if found is not None and found.connected.is_set() and not found.is_closed:
            return found
        self.drop()
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(_read)
        return await asyncio.shield(self._connecting)

    def ready(self, name: str) -> Line | None:
        """The channel of an exchange, if it is open and the exchange was seen lately."""
        line = self._lines.get(name)
        if line is None or line.channel is None or line.channel.is_closed or (line.lost and line.alone):
            return None
        return line if time.monotonic() - line.checked < self._recheck else None

    async def line(self, name: str) -> Line:
        """The open channel of an exchange that exists; NoSuchExchange when the broker denies it."""
        line = self._lines.get(name)
        if line is None:
            if len(self._lines) >= EXCHANGES_MAX:
                raise RuntimeError(f"more than {EXCHANGES_MAX} exchanges")
            line = self._lines[name] = Line()
        async with line.opening:
            if self.ready(name) is not None:
                return line
            await self.require(name)
            line.checked = time.monotonic()
            if line.lost and line.alone and line.channel is not None:
                await line.channel.close()
            if line.channel is None or line.channel.is_closed:
                connection = await self.connection()
                channel = connection.channel(publisher_confirms=True, on_return_raises=True)
                await channel.initialize(timeout=CHANNEL_SECONDS)
                line.channel = channel
                line.lost = False
                line.under = cast(aiormq.Channel, await channel.get_underlay_channel())
        return line

    async def require(self, name: str) -> None:
        """Asks for one exchange on a channel of its own, which the broker closes when there is none."""
        if not name:
            return
        connection = await self.connection()
        channel = connection.channel(publisher_confirms=False)
        await channel.initialize(timeout=CHANNEL_SECONDS)
        try:
            await channel.get_exchange(name, ensure=True)
        except aiormq.exceptions.ChannelNotFoundEntity:
            raise NoSuchExchange(name) from None
        finally:
            if not channel.is_closed:
                await channel.close()

    async def declare(self, name: str) -> None:
        """Makes one exchange, durable and of type topic, unless there is one of that name."""
        with contextlib.suppress(NoSuchExchange):
            await self.require(name)
            return
        connection = await self.connection()
        channel = connection.channel(publisher_confirms=False)
        await channel.initialize(timeout=CHANNEL_SECONDS)
        try:
            await channel.declare_exchange(name, aio_pika.ExchangeType.TOPIC, durable=True)
        finally:
            if not channel.is_closed:
                await channel.close()

    def forget(self, name: str) -> None:
        """The next use of this exchange asks the broker again."""
        line = self._lines.get(name)
        if line is not None:
            line.checked = 0.0

    def suspect(self, name: str) -> None:
        """Events of this exchange go one at a time for a minute."""
        self._lines[name].careful = time.monotonic() + CAREFUL_SECONDS

    def drop(self) -> None:
        """Forgets the connection; the next use makes a new one. Leaving the old one happens beside."""
        found, self._connection = self._connection, None
        for line in self._lines.values():
            line.channel = None
        if found is not None:
            task = asyncio.create_task(leave(found, self._loop.opened))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Leaves the broker within two seconds, or without its answer."""
        if self._connecting is not None:
            self._connecting.cancel()
        found, self._connection = self._connection, None
        if found is not None:
            await leave(found, self._loop.opened)
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=LEAVE_SECONDS)

    async def _connect(self) -> AbstractConnection:
        await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                made = await aio_pika.connect(self._url, ssl_context=self._context, connection_class=_Connection)
        except BaseException:
            abort(self._loop.opened)
            self._not_before = time.monotonic() + self._backoff * random.uniform(0.5, 1.0)
            self._backoff = min(BACKOFF_MAX_SECONDS, self._backoff * 2)
            raise
        self._backoff = BACKOFF_FIRST_SECONDS
        self._connection = made
        for line in self._lines.values():
            line.channel = None
            line.checked = 0.0
        return made


class _Connection(aio_pika.Connection):
    """Ended by `leave` or by dropping its line, never by the garbage collector, which may run in another thread."""

    def __del__(self) -> None:
        """The library would begin an orderly close here, without a loop to run it."""


async def leave(connection: AbstractConnection, transports: list[asyncio.BaseTransport]) -> None:
    """Closes in order if the broker answers within two seconds, else drops the line: no connection is left behind."""
    try:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(LEAVE_SECONDS):
                await connection.close()
    finally:
        abort(transports)


def _read(task: asyncio.Task[AbstractConnection]) -> None:
    """Keeps asyncio from reporting a failure that nobody waited for any longer."""
    if not task.cancelled():
        task.exception()
