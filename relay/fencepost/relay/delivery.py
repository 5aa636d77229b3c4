"""Delivery of one batch: sent a few times until events have definite answers, in order per key, with bounded waits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from typing import assert_never

from fencepost.relay.parking import Parking
from fencepost.relay.publisher import CONFIRMED, Answer, OutboxRow, Outcome, Outgoing, ParkReason, Publisher

BACKOFF_FIRST_SECONDS = 0.05
BACKOFF_CAP_SECONDS = 2.0

# What is not confirmed after so many sends must not keep others waiting: they are read, and it is sent again with them.
SENDS_AT_ONCE = 4
# An event is set aside once so many sends had no confirm for it and one for a later event of another key.
PASSED_OVER = 2
PASSED_OVER_KNOWN = 100_000


@dataclass(frozen=True, slots=True)
class Overtaken:
    """An event whose first arrival came, or may have come, after that of a later one of its key."""

    row: OutboxRow
    overtaken_by: int


@dataclass(slots=True)
class Settled:
    """What became of a batch: how many were confirmed (and, unless all were, which), and what is set aside.

    `unresolved` have no definite answer yet and are to be sent again. Events of a lost slot are in none of them.
    `overtaken` are events, confirmed in the end or not, that had no confirm when a later one of their key had its own; a
    parked one says so itself.
    """

    parked: list[Parking] = field(default_factory=list[Parking])
    unresolved: list[Outgoing] = field(default_factory=list[Outgoing])
    overtaken: list[Overtaken] = field(default_factory=list[Overtaken])
    confirmed: set[int] = field(default_factory=set[int])
    published: int = 0
    resent: int = 0


class Delivery:
    """Publishes batches through one publisher and never takes silence for success.

    An event without a confirm is sent again. Where others, sent behind it and of other keys, are confirmed meanwhile, it
    is set aside in the end, so that it keeps nobody but its key waiting: `nacked` (the broker stored it not) or
    `unanswered`. Where nothing is confirmed, or only what was sent before it, the broker is away or slow: nothing is set aside.
    With `block` later events of a refused one's key are set aside behind it, without it they go on.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        confirm_seconds: float,
        seconds_left: Callable[[], float],
        keep: Callable[[], Container[int]],
        stop: threading.Event,
        drain_seconds: float,
        on_trouble: Callable[[str], None],
        block: bool = True,
    ) -> None:
        self._publisher = publisher
        self._confirm_seconds = confirm_seconds
        self._seconds_left = seconds_left
        self._keep = keep
        self._stop = stop
        self._drain_seconds = drain_seconds
        self._on_trouble = on_trouble
        self._block = block
        self._passed: dict[int, int] = {}

    def send(self, batch: Sequence[Outgoing]) -> Future[list[Outcome]]:
        """Hands a batch to the broker; its answers are there after `confirm_seconds` at the latest."""
        if not batch:
            return _nothing()
        return self._publisher.send(batch, time.monotonic() + self._confirm_seconds)

    def answered(self, answers: Future[list[Outcome]], count: int) -> list[Outcome]:
        """Waits for the answers of a batch of `count` events; silence is unknown."""
        try:
            return answers.result(self._confirm_seconds + 1)
        except FutureTimeout:
            # This process was paused, or the publisher hangs. Looked at once they come, else their keys are withheld for ever.
            answers.add_done_callback(lambda late: late.result())
            return [Outcome(Answer.UNKNOWN, detail="no answer within the deadline")] * count

    @staticmethod
    def all_confirmed(outcomes: Sequence[Outcome]) -> bool:
        """True when there is nothing left to settle."""
        return outcomes.count(CONFIRMED) == len(outcomes) or all(o.answer is Answer.CONFIRMED for o in outcomes)

    def deliver(
        self,
        batch: Sequence[Outgoing],
        first: Sequence[Outcome] | None = None,
        *,
        began: float | None = None,
        patience: float | None = None,
    ) -> Settled:
        """Settles the events of the batch (confirmed or set aside), and says which ones it could not.

        `first` are the answers of a send that was made before, `began` (monotonic) when. Renews the lease between sends
        and drops the events of a slot that was lost: they are its new owner's. Events without a confirm are sent again
        with the same bytes: a few times, as long as that takes less than half a confirm timeout; or for `patience`
        seconds; or until the drain time is over once asked to stop. Gives up when the lease is about to end.
        """
        settled = Settled()
        if first is not None and self.all_confirmed(first):
            settled.published = len(batch)
            if self._passed:
                for item in batch:
                    self._passed.pop(item.row.seq, None)
            return settled
        # Invariant: a key in `blocked` has an event set aside in this batch; the index is that of the earliest.
        blocked: dict[tuple[str, str], int] = {}
        overtaken: dict[int, Overtaken] = {}
        said: dict[int, Outcome] = {}
        pending = list(batch)
        sends = 0 if first is None else 1
        now = time.monotonic()
        stop_at = None if patience is None else now + patience
        enough_at = (now if began is None else began) + self._confirm_seconds / 2
        while pending:
            if first is None:
                if self._stop.is_set() and stop_at is None:
                    stop_at = time.monotonic() + self._drain_seconds
                if stop_at is not None and time.monotonic() >= stop_at:
                    break
                slots = self._keep()
                pending = [item for item in pending if item.row.slot in slots]
                if not pending or self._seconds_left() < self._confirm_seconds:
                    break
                first = self.answered(self.send(pending), len(pending))
                sends += 1
            self._note_passed(pending, first)
            again: list[Outgoing] = []
            waiting: dict[tuple[str, str], list[OutboxRow]] = {}
            passed: dict[tuple[str, str], tuple[int, int]] = {}
            trouble = ""
            for item, outcome in zip(pending, first, strict=True):
                key = (item.row.tenant, item.row.ordering_key)
                if outcome.answer is not Answer.CONFIRMED:
                    waiting.setdefault(key, []).append(item.row)
                elif key in waiting:
                    passed[key] = len(waiting[key]), item.row.seq
                if self._take(item, outcome, settled, blocked):
                    self._passed.pop(item.row.seq, None)
                    continue
                again.append(item)
                said[item.row.seq] = outcome
                trouble = trouble or f"{outcome.answer.value}: {outcome.detail}"
            for key, (count, by) in passed.items():
                overtaken |= {row.seq: Overtaken(row, by) for row in waiting[key][:count]}
            first = None
            pending = again
            if pending:
                settled.resent += len(pending)
                self._on_trouble(trouble)
                enough = sends >= SENDS_AT_ONCE or time.monotonic() >= enough_at
                if enough and stop_at is None and not self._stop.is_set():
                    pending = self._set_aside(pending, said, settled)
                    break
                pause = min(BACKOFF_CAP_SECONDS, BACKOFF_FIRST_SECONDS * 2 ** min(max(0, sends - 1), 10))
                self._pause(pause * (0.5 + random.random() / 2))
        settled.unresolved = pending
        for n, parked in enumerate(settled.parked):
            found = overtaken.pop(parked.row.seq, None)
            if found is not None:
                settled.parked[n] = replace(parked, overtaken_by=found.overtaken_by)
        settled.overtaken = list(overtaken.values())
        return settled

    def _note_passed(self, batch: Sequence[Outgoing], outcomes: Sequence[Outcome]) -> None:
        """Counts the first events of keys without a confirm in a send that confirmed a later event of another key."""
        # The last confirmed event, and the last one of any other key.
        last, last_key, other = -1, ("", ""), -1
        heads: dict[tuple[str, str], int] = {}
        for n, (item, outcome) in enumerate(zip(batch, outcomes, strict=True)):
            key = (item.row.tenant, item.row.ordering_key)
            if outcome.answer is Answer.CONFIRMED:
                if key != last_key:
                    last_key, other = key, last
                last = n
            else:
                heads.setdefault(key, n)
        if len(self._passed) + len(heads) > PASSED_OVER_KNOWN:
            # Forgotten, they are counted anew.
            self._passed.clear()
        for key, n in heads.items():
            if n < (other if key == last_key else last):
                seq = batch[n].row.seq
                self._passed[seq] = self._passed.get(seq, 0) + 1

    def _set_aside(self, pending: list[Outgoing], said: dict[int, Outcome], settled: Settled) -> list[Outgoing]:
        """Parks the events that others get past, with what waits behind them; returns the rest."""
        left: list[Outgoing] = []
        waiting: set[tuple[str, str]] = set()
        aside: set[tuple[str, str]] = set()
        for item in pending:
            key = (item.row.tenant, item.row.ordering_key)
            outcome = said[item.row.seq]
            if key in aside:
                settled.parked.append(Parking(item.row, ParkReason.BEHIND, outcome.answer.value))
            elif key in waiting or self._passed.get(item.row.seq, 0) < PASSED_OVER:
                left.append(item)
                waiting.add(key)
            else:
                reason = ParkReason.NACKED if outcome.answer is Answer.NACKED else ParkReason.UNANSWERED
                settled.parked.append(Parking(item.row, reason, outcome.detail))
                aside.add(key)
                del self._passed[item.row.seq]
        return left

    def _pause(self, seconds: float) -> None:
        """Ends early when told to stop, once; while draining it lasts."""
        if self._stop.is_set():
            time.sleep(seconds)
        else:
            self._stop.wait(seconds)

    def _take(self, item: Outgoing, outcome: Outcome, settled: Settled, blocked: dict[tuple[str, str], int]) -> bool:
        """True when the event is settled; keeps the events of a refused key in order behind it."""
        row = item.row
        key = (row.tenant, row.ordering_key)
        first = settled.parked[blocked[key]] if key in blocked else None
        # Invariant: only later events wait behind a parked one; an earlier one without an answer is sent again.
        behind = first is not None and first.row.seq < row.seq
        match outcome.answer:
            case Answer.CONFIRMED:
                settled.confirmed.add(row.seq)
                settled.published += 1
                return True
            case Answer.REFUSED:
                assert outcome.reason is not None
                settled.parked.append(Parking(row, outcome.reason, outcome.detail))
                if self._block and not behind:
                    blocked[key] = len(settled.parked) - 1
                return True
            case Answer.WITHHELD if behind:
                settled.parked.append(Parking(row, ParkReason.BEHIND))
                return True
            case Answer.NACKED | Answer.UNKNOWN | Answer.WITHHELD:
                if behind:
                    # Not known to be at the broker, and an earlier one of its key is not: it waits behind that one.
                    settled.parked.append(Parking(row, ParkReason.BEHIND, outcome.answer.value))
                    return True
                return False
            case _ as never:
                assert_never(never)


def _nothing() -> Future[list[Outcome]]:
    """The answers of a batch without events."""
    done: Future[list[Outcome]] = Future()
    done.set_result([])
    return done
