"""What a handler gets: effects recorded before they are dispatched, publication behind the fence, staging without one."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, TypeVar

from psycopg import Connection

from fencepost.jobs import stage as staging
from fencepost.jobs.compute import Computers
from fencepost.jobs.conduct import Conduct, Opened
from fencepost.jobs.effects import Dispatch, Kind, NotSent, Recorded, Success
from fencepost.jobs.execution import Execution, Waiting
from fencepost.jobs.lanes import Lanes, certain
from fencepost.jobs.progress import Reporter
from fencepost.jobs.publish import FencedTransaction, publish
from fencepost.jobs.result import keepable
from fencepost.jobs.signals import Signal, signals
from fencepost.jobs.wait import Answer, Until, wait
from fencepost.schemas.errors import InvalidInput, WrongTransaction

__all__ = ["AsyncContext", "Context"]

T = TypeVar("T")
Request = Mapping[str, object] | bytes
Call = Callable[[Any, Dispatch], Success]
AsyncCall = Callable[[Any, Dispatch], Awaitable[Success] | Success]


class Held:
    """What both kinds of context share: the claim, its lease, and the lanes to the database."""

    def __init__(self, execution: Execution, work: Lanes, outcomes: Lanes, computers: Computers) -> None:
        self._execution = execution
        self._computers = computers
        self._work = work
        self._outcomes = outcomes
        self._conduct = Conduct(execution, work, outcomes)
        self._reporter: Reporter | None = None

    @property
    def lost(self) -> threading.Event:
        """Set once this attempt has lost its lease: stop soon, publish nothing, stage what is worth keeping."""
        return self._execution.lost

    def lease_left(self) -> float:
        """Seconds for which the lease certainly holds; renewed by itself while the handler runs."""
        return self._execution.left()

    def check(self) -> None:
        """Raises LeaseLost when the lease is over; call it between steps of long work."""
        self._execution.check()

    def progress(self, fraction: float, note: str = "") -> None:
        """Tells how far the work is, from 0 to 1; waits for nothing, and drops what comes within a second of the last.

        ``note`` has at most 200 characters. What a stale attempt tells is refused, and nobody hears of it.
        """
        if self._reporter is None:
            self._reporter = Reporter(self._execution.job.fence, self._work)
        self._reporter.tell(fraction, note)

    def _publish(self, callback: Callable[[FencedTransaction], T], kept: object) -> Future[T]:
        execution = self._execution
        execution.forbid_inside("another publication")
        if execution.published:
            raise WrongTransaction(
                "this attempt has published", field="publication", hint="write everything in one callback"
            )
        raw = None if kept is None else keepable(kept)

        def work(conn: Connection[Any]) -> T:
            done = False
            execution.begin_writing()
            try:
                result = publish(conn, execution.job.fence, callback, lease=execution.left(), result=raw)
                done = True
                return result
            finally:
                execution.end_writing(published=done)

        return self._work.send(work)

    def _wait(self, signal: str | None, until: Until | None) -> Future[Answer]:
        execution = self._execution
        execution.forbid_inside("waiting")

        def work(conn: Connection[Any]) -> Answer:
            execution.begin_writing()
            try:
                answer = wait(conn, execution.job.fence, signal=signal, until=until)
                if answer == "waiting":
                    execution.leave()
                return answer
            finally:
                execution.end_writing(published=False)

        return self._outcomes.send(work)

    def _signals(self) -> Future[list[Signal]]:
        self._execution.forbid_inside("reading signals")
        return self._work.send(lambda conn: signals(conn, self._execution.job.fence))

    def _stage(self, result: object) -> Future[bool]:
        staging.dump(result, "result")
        return self._outcomes.send(lambda conn: staging.stage(conn, self._execution.job.fence, result))

    def _staged(self) -> Future[staging.Staged | None]:
        self._execution.forbid_inside("reading what was staged")
        return self._work.send(lambda conn: staging.staged(conn, self._execution.job.fence))


class Context(Held):
    """For a synchronous handler, which runs in a thread of its own."""

    def effect(
        self,
        effect_key: str,
        call: Call,
        request: Request,
        *,
        kind: Kind = "opaque",
        timeout: float | None = None,
    ) -> Success:
        """Dispatches ``call(request, dispatch)`` at most once, recorded before; returns its Success, or the stored one.

        ``timeout`` in seconds, from before the record, default and maximum: the class's ``max_effect_timeout``. The
        call runs in a helper thread and is abandoned at the deadline. Only a returned Success and a NotDispatched that
        the call raises are definite; anything else, a refused connection too, leaves the effect unknown and the job blocked
        until it is reconciled: EffectUnknown. A definite failure raises NotDispatched, and may be tried again. Also raises
        StaleFence, EffectOpen, OperationConflict (same key, other request), EffectLimit, FinishOnly, and WrongTransaction
        inside a publication's callback.
        """
        if inspect.iscoroutinefunction(call):
            raise InvalidInput(
                "call is asynchronous", field="call", hint="make the handler `async def`, or the call plain"
            )
        began = self._conduct.begin(effect_key, request, kind, timeout).result()
        if isinstance(began, Recorded):
            return Success(began.receipt, began.result)
        if (refusal := self._conduct.refusal(began)) is not None:
            return refusal.result()
        return self._conclude(began, abandonable(lambda: in_time(call, request, began.dispatch)))

    def _conclude(self, began: Opened, answer: Future[Any]) -> Success:
        try:
            answer.result(timeout=began.dispatch.seconds_left())
        except BaseException as error:  # noqa: BLE001 (whatever it is, it is an outcome)
            # Invariant: an answer that arrives at this very moment is not lost: it is taken below, or followed.
            if not answer.done():
                self._conduct.follow(began, answer)
                why = "timeout" if isinstance(error, NotInTime) else "raised"
                return self._conduct.raised(began, error, why).result()
        if (raised := answer.exception()) is not None:
            return self._conduct.raised(began, raised, "raised").result()
        return self._conduct.returned(began, answer.result()).result()

    def publish(self, callback: Callable[[FencedTransaction], T], *, result: object = None) -> T:
        """Commits what ``callback(tx)`` writes and completes the job, behind the fence; returns what it returned.

        ``result``: JSON of at most 64 KiB, kept in that commit for whoever asks what the job returned.
        Raises as ``fencepost.jobs.publish.publish`` does; after StaleFence and LeaseLost, ``stage`` still works. Inside
        the callback of this context only ``stage``, ``check``, ``lost`` and ``lease_left`` may be used: WrongTransaction.
        """
        return self._publish(callback, result).result()

    def wait(self, *, signal: str | None = None, until: Until | None = None) -> Signal | None:
        """Ends this attempt, uncharged, until the signal or the time has come; then the handler runs from its start.

        Returns when that has come already: the first signal of that name, or None for the time. ``until`` is an aware
        datetime, or a timedelta or seconds: with a signal counted from the first wait for it, without one from now, so
        that the job sleeps anew each time it comes here. What a run was told about a signal, every later run is told too.

        Leaves the handler by Waiting: let it out. Raises EffectOpen while an effect is pending or unknown, StaleFence,
        InvalidInput, and WrongTransaction inside a publication's callback.
        """
        return come(self._wait(signal, until).result())

    def signals(self) -> list[Signal]:
        """Everything that this job was told so far; WrongTransaction inside a callback."""
        return self._signals().result()

    def signalled(self, name: str) -> Signal | None:
        """The first signal of this name, or None; WrongTransaction inside a callback."""
        return next((signal for signal in self.signals() if signal.name == name), None)

    def compute(self, function: Callable[..., T], *args: object, timeout: float | None = None) -> T:
        """Runs ``function(*args)`` in a process of its own, on another core; returns or raises what it does.

        It gets values only, no context: it can neither write nor publish. A lost lease does not end it, so that its result
        can be staged; ``timeout`` in seconds does, and so does the stop of the worker. ``function`` is one at module level.
        Raises ComputationDied when its process ended (killed, out of memory, too late): the attempt may be tried again;
        InvalidInput when function, args or result cannot be pickled.
        """
        return self._computers.run(function, args, timeout)

    def stage(self, result: object) -> bool:
        """Keeps a JSON result for the successor, with or without the lease; True when it is this attempt's first."""
        return self._stage(result).result()

    def staged(self) -> staging.Staged | None:
        """The newest result that any attempt staged for this job, or None; WrongTransaction inside a callback."""
        return self._staged().result()


class AsyncContext(Held):
    """For an asynchronous handler; its task is cancelled when the lease is lost.

    Every method may be cancelled: what has reached the database is still recorded before CancelledError goes on.
    """

    async def effect(
        self,
        effect_key: str,
        call: AsyncCall,
        request: Request,
        *,
        kind: Kind = "opaque",
        timeout: float | None = None,
    ) -> Success:
        """As ``Context.effect``; an asynchronous call is cancelled at the deadline, a plain one runs in a thread.

        Cancellation before the dispatch is a definite failure, during it the effect is unknown.
        """
        conduct = self._conduct
        opening = asyncio.ensure_future(asyncio.wrap_future(conduct.begin(effect_key, request, kind, timeout)))
        try:
            began = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # Invariant: nothing was dispatched, so what the begin may have recorded is taken back as definite.
            await finished(conduct.withdraw(opening))
            raise
        if isinstance(began, Recorded):
            return Success(began.receipt, began.result)
        if (refusal := conduct.refusal(began)) is not None:
            return await finished(asyncio.wrap_future(refusal))
        try:
            value = await self._dispatch(call, request, began)
        except asyncio.CancelledError as error:
            await finished(settled(conduct.raised(began, error, "cancelled")))
            raise
        except BaseException as error:  # noqa: BLE001 (whatever it is, it is an outcome)
            late = isinstance(error, TimeoutError) and began.dispatch.seconds_left() == 0
            return await finished(asyncio.wrap_future(conduct.raised(began, error, "timeout" if late else "raised")))
        return await finished(asyncio.wrap_future(conduct.returned(began, value)))

    async def _dispatch(self, call: AsyncCall, request: Request, began: Opened) -> Any:
        async with asyncio.timeout(began.dispatch.seconds_left()):
            if inspect.iscoroutinefunction(call):
                return await call(request, began.dispatch)
            answer = abandonable(lambda: in_time(call, request, began.dispatch))
            try:
                value = await asyncio.shield(watched(answer))
            except asyncio.CancelledError:
                self._conduct.follow(began, answer)
                raise
            return await value if inspect.isawaitable(value) else value

    async def publish(self, callback: Callable[[FencedTransaction], T], *, result: object = None) -> T:
        """As ``Context.publish``; the callback is a plain function and runs in a thread.

        Cancelled while it runs, it is waited for: what was committed counts as published.
        """
        return await finished(asyncio.wrap_future(self._publish(callback, result)))

    async def wait(self, *, signal: str | None = None, until: Until | None = None) -> Signal | None:
        """As ``Context.wait``; cancelled meanwhile, it is waited for, and the job may wait already."""
        return come(await finished(asyncio.wrap_future(self._wait(signal, until))))

    async def signals(self) -> list[Signal]:
        """As ``Context.signals``."""
        return await asyncio.wrap_future(self._signals())

    async def signalled(self, name: str) -> Signal | None:
        """As ``Context.signalled``."""
        return next((signal for signal in await self.signals() if signal.name == name), None)

    async def compute(self, function: Callable[..., T], *args: object, timeout: float | None = None) -> T:
        """As ``Context.compute``; when the task is cancelled, as after a lost lease, its process is killed."""
        given_up = threading.Event()
        answer = abandonable(lambda: self._computers.run(function, args, timeout, given_up))
        try:
            return await asyncio.shield(watched(answer))
        except asyncio.CancelledError:
            given_up.set()
            raise

    async def stage(self, result: object) -> bool:
        """As ``Context.stage``."""
        return await finished(asyncio.wrap_future(self._stage(result)))

    async def staged(self) -> staging.Staged | None:
        """As ``Context.staged``."""
        return await asyncio.wrap_future(self._staged())


def come(answer: Answer) -> Signal | None:
    """What came, or None for the time; Waiting where the job waits for it."""
    if answer == "waiting":
        raise Waiting("the job waits")
    return None if answer == "time" else answer


async def finished(work: Awaitable[T]) -> T:
    """Waits for the work even when cancelled meanwhile; then the cancellation goes on."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
        except BaseException:  # noqa: BLE001 (raised below, from the task)
            break
    if cancelled:
        if not task.cancelled():
            task.exception()
        raise asyncio.CancelledError
    return task.result()


async def settled(work: Future[Any]) -> None:
    """Waits for an outcome to be written, whatever it says."""
    with contextlib.suppress(Exception):
        await asyncio.wrap_future(work)


def watched(answer: Future[T]) -> asyncio.Future[T]:
    """The answer for this event loop; one that comes after its waiter has gone is not complained about."""
    made = asyncio.wrap_future(answer)
    made.add_done_callback(lambda done: done.cancelled() or done.exception())
    return made


def in_time(call: Callable[[Any, Dispatch], T], request: Request, dispatch: Dispatch) -> T:
    """Starts the call unless its thread came too late for that."""
    if dispatch.seconds_left() == 0:
        raise NotSent("deadline_before_dispatch")
    return call(request, dispatch)


def abandonable(call: Callable[[], T]) -> Future[T]:
    """Runs the call in a daemon thread, which nobody has to wait for."""
    answer: Future[T] = certain()

    def run() -> None:
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 (it belongs to whoever waits)
            answer.set_exception(error)
        else:
            answer.set_result(value)

    threading.Thread(target=run, name="fencepost-call", daemon=True).start()
    return answer
