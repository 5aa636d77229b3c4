"""RabbitMQ: an event counts as published only after the broker's own Basic.Ack of it, routed and persistent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from datetime import datetime
from typing import cast

import aiormq
from aiormq import spec

from fencepost.relay.answers import Answers, Key, StoppedKeys, key_of
from fencepost.relay.publisher import CONFIRMED, UNKNOWN_VERSION, Answer, Outcome, Outgoing, ParkReason, Place, Route
from fencepost.relay.rabbitmq_link import Line, Link, Loop, NoSuchExchange
from fencepost.relay.rabbitmq_refusals import unreachable
from fencepost.relay.structured import Mode, document
from fencepost.schemas import amqp_binding, json_format
from fencepost.schemas.amqp_address import checked_address
from fencepost.schemas.digest import TAG
from fencepost.schemas.envelope import CONTENT_TYPE
from fencepost.schemas.errors import ConfigError, FencepostError, Unreachable

LOGGER = logging.getLogger(__name__)

PERSISTENT = 2
MESSAGE_BYTES = 16 * 1024 * 1024
MARGIN_SECONDS = 0.05
PROBE_SECONDS = 1.0
LEAVE_SECONDS = 5.0
ROUTING_KEY_BYTES = 255
BROKEN = (aiormq.exceptions.AMQPError, OSError, EOFError, RuntimeError, asyncio.InvalidStateError)
"""What a connection or channel that is gone, or never came, raises; a missed deadline is an OSError too."""

_NOT_SENT = Outcome(Answer.WITHHELD, detail="an earlier event of its key has no confirm")


class RabbitPublisher:
    """Hands events to RabbitMQ with confirms and `mandatory`, persistent, one unconfirmed event per key.

    `source`: CloudEvents source of the installation. `mode`: of CloudEvents. `window`: unconfirmed events in all.
    `max_message_bytes`: body size beyond which an event is refused without asking; the default of 16 MiB is that of
    RabbitMQ 4 (3.x: 128 MiB).
    `recheck` (seconds): how long the existence of an exchange is believed. `context`: TLS settings for `amqps://`.
    ConfigError: see `fencepost.schemas.amqp_address`. Runs an event loop in a thread of its own and reconnects by itself, never
    longer than the deadline of a send.

    Blame: every exchange has a channel of its own. When the broker closes it with several events on it, all of them are
    unknown and that exchange takes one event at a time for a minute, so that only the guilty one is refused.
    """

    def __init__(
        self,
        url: str,
        *,
        source: str,
        window: int = 500,
        max_message_bytes: int = MESSAGE_BYTES,
        recheck: float = 30.0,
        context: ssl.SSLContext | None = None,
        insecure: bool = False,
        mode: Mode = "binary",
    ) -> None:
        self._url = checked_address(url, insecure=insecure)
        if window < 1:
            raise ConfigError("the window must be at least 1", field="window")
        if context is not None and not insecure and context.verify_mode is not ssl.CERT_REQUIRED:
            raise ConfigError("the server would not be verified", field="context", hint="or insecure=True")
        self._source = source
        self._structured = mode == "structured"
        self._encode = amqp_binding.encoder(source)
        self._window = window
        self._max_bytes = max_message_bytes
        self._context = context
        self._recheck = recheck
        self._lock = threading.Lock()
        self._number = 0
        self._unresolved: dict[int, Answers] = {}
        self._accepting = False
        self._loop: Loop | None = None
        self._thread: threading.Thread | None = None
        # Only the loop's thread touches these.
        self._waiting: dict[Key, deque[tuple[Answers, int]]] = {}
        self._ready: deque[Key] = deque()
        self._stopped = StoppedKeys()
        self._workers: set[asyncio.Task[None]] = set()
        self._link: Link
        self._probing: asyncio.Lock
        self._doubt = False

    def __repr__(self) -> str:
        return f"RabbitPublisher({str(Unreachable(address=self._url)).strip(' ()')!r})"

    def open(self, deadline: float) -> None:
        """Connect, or raise `Unreachable` (address without user and password) before `deadline`."""
        loop = Loop()
        thread = threading.Thread(target=_run, args=(loop,), name="fencepost-rabbitmq", daemon=True)
        thread.start()
        self._loop, self._thread = loop, thread
        self._link = Link(loop, self._url, self._context, self._recheck)
        self._probing = asyncio.Lock()
        connecting = asyncio.run_coroutine_threadsafe(self._link.connection(), loop)
        try:
            connecting.result(timeout=max(0.0, deadline - time.monotonic()))
        except (*BROKEN, ValueError) as error:
            connecting.cancel()
            self._leave()
            raise unreachable(error, self._url) from None
        self._accepting = True

    def declare(self, routes: Sequence[Route], deadline: float) -> None:
        """Declares the exchanges that are missing, durable and of type topic, and leaves the others as they are.

        Raises `Unreachable` when the broker does not answer before `deadline` (monotonic seconds), ConfigError when it
        refuses.
        """
        for name in sorted({route.to for route in routes}):
            assert self._loop is not None
            declaring = asyncio.run_coroutine_threadsafe(self._link.declare(name), self._loop)
            try:
                declaring.result(timeout=max(0.0, deadline - time.monotonic()))
            except (aiormq.exceptions.ChannelAccessRefused, aiormq.exceptions.ChannelPreconditionFailed) as error:
                raise ConfigError(
                    f"RabbitMQ refuses to declare exchange {name}: {type(error).__name__}",
                    field="declare",
                    hint="declare it yourself and set declare to false, or grant the right to configure it",
                ) from None
            except BROKEN as error:
                declaring.cancel()
                raise Unreachable(
                    f"RabbitMQ did not declare exchange {name}: {type(error).__name__}",
                    address=self._url,
                    field="declare",
                ) from None

    def send(self, batch: Sequence[Outgoing], deadline: float) -> Future[list[Outcome]]:
        """One outcome per event at `deadline` (monotonic seconds) at the latest; returns at once.

        Withheld events were not sent: an earlier one of their key has no confirm, or there was no connection.
        """
        with self._lock:
            self._number += 1
            answers = Answers(self._number, batch, deadline)
            self._stopped.sending(answers.number)
            if self._accepting and self._loop is not None:
                self._unresolved[answers.number] = answers
                answers.future.add_done_callback(lambda _: self._unresolved.pop(answers.number, None))
                self._loop.call_soon_threadsafe(self._take, answers)
                return answers.future
        for index in range(len(batch)):
            answers.answer(index, Outcome(Answer.WITHHELD, detail="the publisher is closed"))
        return answers.future

    def inspect(self, names: Sequence[str], deadline: float) -> dict[str, Place]:
        """Whether these exchanges exist, or `Unreachable`."""
        loop = self._loop
        if loop is None:
            raise Unreachable("the publisher is closed", address=self._url, field="url")
        asking = asyncio.run_coroutine_threadsafe(self._ask(names), loop)
        try:
            return asking.result(timeout=max(0.0, deadline - time.monotonic()))
        except BROKEN as error:
            asking.cancel()
            raise unreachable(error, self._url) from None

    def close(self, deadline: float) -> None:
        """Wait for confirms until `deadline`, then leave, in at most a few seconds; the rest becomes unknown."""
        with self._lock:
            self._accepting = False
            waiting = [answers.future for answers in list(self._unresolved.values())]
        wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        self._leave()
        for answers in list(self._unresolved.values()):
            answers.give_up("the publisher was closed")

    def _leave(self) -> None:
        loop, self._loop = self._loop, None
        thread, self._thread = self._thread, None
        if loop is None or thread is None:
            return
        leaving = asyncio.run_coroutine_threadsafe(self._end(), loop)
        with contextlib.suppress(TimeoutError):
            leaving.result(timeout=LEAVE_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=LEAVE_SECONDS)

    async def _ask(self, names: Sequence[str]) -> dict[str, Place]:
        found: dict[str, Place] = {}
        for name in names:
            try:
                await self._link.require(name or "amq.direct")
                found[name] = Place(None, self._max_bytes)
            except NoSuchExchange:
                found[name] = Place(ParkReason.NO_SUCH_EXCHANGE)
            except aiormq.exceptions.ChannelAccessRefused:
                found[name] = Place(ParkReason.NOT_AUTHORISED)
        return found

    async def _end(self) -> None:
        for worker in list(self._workers):
            worker.cancel()
        if self._workers:
            await asyncio.wait(self._workers, timeout=1)
        await self._link.close()

    # -- in the loop's thread ----------------------------------------------------------------------------------------

    def _take(self, answers: Answers) -> None:
        self._stopped.reached(answers.number)
        for index, event in enumerate(answers.batch):
            key = key_of(event)
            if key in self._stopped.keys:
                self._withhold(key, answers, index)
                continue
            queue = self._waiting.get(key)
            if queue is None:
                # Invariant: a key is in `_ready` or in the hands of one worker, never both, never twice.
                self._waiting[key] = deque([(answers, index)])
                self._ready.append(key)
            else:
                queue.append((answers, index))
        loop = asyncio.get_running_loop()
        alarm = loop.call_at(answers.deadline - MARGIN_SECONDS, answers.give_up, "no confirm by the deadline")
        answers.future.add_done_callback(lambda _: alarm.cancel())
        for _ in range(min(self._window - len(self._workers), len(self._ready))):
            worker = loop.create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    async def _work(self) -> None:
        while self._ready:
            key = self._ready.popleft()
            queue = self._waiting[key]
            answers, index = queue.popleft()
            try:
                outcome = Outcome(Answer.WITHHELD) if answers.done else await self._publish(answers, index)
            except Exception:
                LOGGER.exception("publishing one event failed in an unexpected way; it stays unknown")
                outcome = Outcome(Answer.UNKNOWN, detail="unexpected")
            answers.answer(index, outcome)
            if outcome.answer is not Answer.CONFIRMED:
                self._stopped.stop(key, answers)
                for later, position in queue:
                    self._withhold(key, later, position)
                queue.clear()
            if queue:
                self._ready.append(key)
            else:
                del self._waiting[key]

    def _withhold(self, key: Key, answers: Answers, index: int) -> None:
        self._stopped.stop(key, answers)
        answers.answer(index, _NOT_SENT)

    async def _publish(self, answers: Answers, index: int) -> Outcome:
        event = answers.batch[index]
        message = self._message(event)
        if isinstance(message, Outcome):
            return message
        name = event.route.to
        routing_key = event.route.routing_key.replace("{type}", event.row.type)
        if len(routing_key.encode()) > ROUTING_KEY_BYTES:
            return Outcome(Answer.REFUSED, ParkReason.UNROUTABLE, "the routing key is longer than 255 bytes")
        line = None if self._doubt else self._link.ready(name)
        try:
            if line is None:
                async with asyncio.timeout_at(answers.deadline - MARGIN_SECONDS):
                    await self._settle_doubt()
                    line = await self._link.line(name)
        except NoSuchExchange:
            return Outcome(Answer.REFUSED, ParkReason.NO_SUCH_EXCHANGE, name)
        except aiormq.exceptions.ChannelAccessRefused:
            return Outcome(Answer.REFUSED, ParkReason.NOT_AUTHORISED, name)
        except BROKEN as error:
            self._doubt = self._doubt or isinstance(error, TimeoutError)
            return Outcome(Answer.WITHHELD, detail=f"not connected: {type(error).__name__}")
        if line.alone:
            async with line.room:
                if answers.done:
                    return Outcome(Answer.WITHHELD)
                return await self._confirm(line, event, routing_key, message, answers.deadline)
        return await self._confirm(line, event, routing_key, message, answers.deadline)

    async def _confirm(
        self,
        line: Line,
        event: Outgoing,
        routing_key: str,
        message: tuple[bytes, spec.Basic.Properties],
        deadline: float,
    ) -> Outcome:
        name = event.route.to
        body, properties = message
        under = line.under
        if under is None or line.channel is None or line.channel.is_closed:
            return Outcome(Answer.WITHHELD, detail="the channel was closed")
        # Invariant: only an event that had the channel to itself from start to end can be blamed for its death.
        alone = line.in_flight == 0 and not line.lost
        line.in_flight += 1
        try:
            # Not waiting for the socket: what is unconfirmed is bounded by the window, and its bytes are in memory anyway.
            result = await under.basic_publish(
                body,
                exchange=name,
                routing_key=routing_key,
                properties=properties,
                mandatory=True,
                wait=False,
                timeout=max(0.0, deadline - MARGIN_SECONDS - time.monotonic()),
            )
        except aiormq.exceptions.PublishError:
            return Outcome(Answer.REFUSED, ParkReason.UNROUTABLE, f"{name} {routing_key}"[:200])
        except aiormq.exceptions.DeliveryError:
            return Outcome(Answer.NACKED, detail="the broker could not store it")
        except TimeoutError:
            self._doubt = line.lost = True
            return Outcome(Answer.UNKNOWN, detail="no confirm by the deadline")
        except aiormq.exceptions.AMQPChannelError as error:
            return await self._blame(name, error, alone and line.alone, deadline)
        except BROKEN as error:
            self._link.forget(name)
            return Outcome(Answer.UNKNOWN, detail=type(error).__name__)
        finally:
            line.in_flight -= 1
        if isinstance(result, spec.Basic.Ack):
            # Crash here: [B4] stored by RabbitMQ and not counted: sent again, same bytes, with what was sent with it.
            return CONFIRMED
        return Outcome(Answer.UNKNOWN, detail=type(result).__name__)

    async def _blame(self, name: str, error: Exception, certain: bool, deadline: float) -> Outcome:
        """The broker closed the channel of this exchange: refuse the event if it is surely the cause, else unknown."""
        self._link.forget(name)
        if isinstance(error, aiormq.exceptions.ChannelNotFoundEntity):
            try:
                async with asyncio.timeout_at(deadline - MARGIN_SECONDS):
                    await self._link.require(name)
            except NoSuchExchange:
                return Outcome(Answer.REFUSED, ParkReason.NO_SUCH_EXCHANGE, name)
            except BROKEN as other:
                return Outcome(Answer.UNKNOWN, detail=type(other).__name__)
            return Outcome(Answer.UNKNOWN, detail="the exchange was missing for a moment")
        if certain and isinstance(error, aiormq.exceptions.ChannelAccessRefused):
            return Outcome(Answer.REFUSED, ParkReason.NOT_AUTHORISED, name)
        if certain and isinstance(error, aiormq.exceptions.ChannelPreconditionFailed):
            return Outcome(Answer.REFUSED, ParkReason.TOO_LARGE, "the broker's limit")
        self._link.suspect(name)
        return Outcome(Answer.UNKNOWN, detail=type(error).__name__)

    async def _settle_doubt(self) -> None:
        """After a missing confirm: ask the broker something harmless; a connection that is silent is replaced."""
        if not self._doubt:
            return
        async with self._probing:
            if not self._doubt:
                return
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    await self._link.require("amq.direct")
            except NoSuchExchange:
                pass
            except BROKEN:
                self._link.drop()
            self._doubt = False

    def _message(self, event: Outgoing) -> tuple[bytes, spec.Basic.Properties] | Outcome:
        """Body and properties, or the refusal of a row that can never become a message."""
        row = event.row
        if row.digest[:1] != TAG or row.content_type != CONTENT_TYPE:
            return UNKNOWN_VERSION
        headers: dict[str, str] = {}
        body, content_type = row.payload, CONTENT_TYPE
        try:
            if not row.payload:
                raise ValueError("an event without a payload is none")
            if self._structured:
                body, content_type = document(row, self._source), json_format.STRUCTURED
            else:
                headers = self._encode(
                    row.event_id,
                    row.type,
                    row.version,
                    row.tenant,
                    row.operation,
                    row.ordering_key,
                    row.epoch,
                    row.digest,
                    row.seq,
                    row.recorded_at,
                    cast(dict[str, str], json.loads(row.attributes)) if row.attributes else None,
                    row.reference,
                )
        except (FencepostError, ValueError, TypeError, AttributeError) as error:
            return Outcome(Answer.REFUSED, ParkReason.UNDECODABLE, type(error).__name__)
        if len(body) > self._max_bytes:
            detail = f"{len(body)} bytes, the limit is {self._max_bytes}"
            return Outcome(Answer.REFUSED, ParkReason.TOO_LARGE, detail)
        properties = spec.Basic.Properties(
            content_type=content_type,
            headers=dict(headers),
            delivery_mode=PERSISTENT,
            message_id=str(row.event_id),
            timestamp=datetime.fromisoformat(row.recorded_at),
        )
        return body, properties


def _run(loop: Loop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.drop_connections()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()
