"""Assigned partitions: what waits, what runs, and up to where everything is done. No broker and no database here.

Events of one key run one after the other, in their order; different keys of a partition side by side, or up to ``batch`` of
them in one hand. An offset counts as done only when everything below it is done, so a slow key holds back the offset and
never another key.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.runner import RunnerOptions, Tries

__all__ = ["Lane", "Lanes", "Work"]

# At least; twice a batch, where that is more.
BUFFER_MESSAGES = 64
BUFFER_BYTES = 1024 * 1024
# How far a partition runs ahead of its slowest key; what a crash hands out again is at most this.
AHEAD_MESSAGES = 1000


@dataclass(slots=True, eq=False)
class Hand:
    """What was started together: it is empty when the last of it is done, or has to run again."""

    works: int


@dataclass(slots=True, eq=False)
class Work:
    """One delivery of a partition, from its arrival until it is done."""

    lane: Lane
    offset: int
    delivery: Delivery | None
    key: bytes
    bytes: int
    tries: Tries
    since: float
    not_before: float = 0.0
    hand: Hand | None = None

    @property
    def done(self) -> bool:
        """Whether it is committed in the database."""
        return self.delivery is None


@dataclass(slots=True, eq=False)
class Lane:
    """One assigned partition. Changed under the lock of its `Lanes` only; ``paused`` belongs to the poll loop."""

    topic: str
    partition: int
    topic_id: str
    room: int = BUFFER_MESSAGES
    closed: bool = False
    paused: bool = False
    # In the order of their offsets; those above the first unfinished one may be done already.
    works: deque[Work] = field(default_factory=deque[Work])
    keys: dict[bytes, deque[Work]] = field(default_factory=dict[bytes, deque[Work]])
    # The first of each key that does not run: to be started now, or not before its time.
    ready: deque[Work] = field(default_factory=deque[Work])
    delayed: list[Work] = field(default_factory=list[Work])
    waiting: int = 0
    bytes_waiting: int = 0
    running: int = 0
    # Invariant: every message below `end` is committed in the database; None until the first is.
    end: int | None = None
    committed: int | None = None

    @property
    def full(self) -> bool:
        """Whether nothing more should be fetched."""
        return self.waiting >= self.room or self.bytes_waiting >= BUFFER_BYTES or len(self.works) >= AHEAD_MESSAGES

    @property
    def roomy(self) -> bool:
        """Whether a full one may be filled again."""
        return (
            self.waiting <= self.room // 4
            and self.bytes_waiting <= BUFFER_BYTES // 4
            and len(self.works) <= AHEAD_MESSAGES // 2
        )

    def behind(self, high: int) -> int:
        """Messages below the broker's end ``high`` that are not done; none where nothing has arrived yet."""
        works = self.works
        try:
            base = works[0].offset
        except IndexError:
            base = high if self.end is None else self.end
        return max(0, high - base)


class Lanes:
    """Every assigned partition; at most ``options.concurrency`` hands of ``options.batch`` run, partitions in turn.

    Locks: one, never held over a call to anything else.
    """

    def __init__(self, options: RunnerOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._turn: deque[Lane] = deque()
        self._running = 0
        self._hands = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def all(self) -> list[Lane]:
        """Those that are assigned now."""
        with self._lock:
            return list(self._lanes.values())

    @property
    def running(self) -> int:
        """Deliveries in the hands of handlers, of partitions that were taken away as well."""
        return self._running

    def of(self, topic: str, partition: int) -> Lane | None:
        """The lane of a partition that is ours."""
        return self._lanes.get((topic, partition))

    def assign(self, topic: str, partition: int, topic_id: str, end: int | None = None) -> None:
        """A partition is ours from here on; everything below ``end`` is known to be done."""
        with self._lock:
            lane = Lane(topic, partition, topic_id, max(BUFFER_MESSAGES, 2 * self._options.batch), end=end)
            self._lanes[topic, partition] = lane
            self._turn.append(lane)

    def forget(self, topic: str, partition: int) -> None:
        """A partition is not ours any more: nothing of it starts, and what still runs there moves no offset."""
        with self._lock:
            lane = self._lanes.pop((topic, partition), None)
            if lane is not None:
                lane.closed = True
                self._turn.remove(lane)

    def close(self) -> None:
        """Nothing starts any more."""
        with self._lock:
            self._closed = True

    def add(self, lane: Lane, offset: int, delivery: Delivery) -> None:
        """A delivery behind all others of its partition."""
        work = Work(
            lane,
            offset,
            delivery,
            delivery.order,
            len(delivery.body),
            Tries(self._options),
            time.monotonic(),
        )
        with self._lock:
            lane.works.append(work)
            lane.waiting += 1
            lane.bytes_waiting += work.bytes
            of_key = lane.keys.setdefault(work.key, deque())
            of_key.append(work)
            if len(of_key) == 1:
                lane.ready.append(work)

    def start(self) -> list[Work]:
        """What is to run next in one hand, each of another key; from now on it runs. Empty while enough run.

        What was tried before runs alone.
        """
        now = time.monotonic()
        with self._lock:
            works: list[Work] = []
            if self._closed or self._hands >= self._options.concurrency:
                return works
            while len(works) < self._options.batch and (work := self._next(now, fresh=bool(works))) is not None:
                works.append(work)
                if work.tries.tries:
                    break
            if works:
                self._hands += 1
                hand = Hand(len(works))
                for work in works:
                    work.hand = hand
            return works

    def _next(self, now: float, *, fresh: bool) -> Work | None:
        for _ in range(len(self._turn)):
            lane = self._turn[0]
            self._turn.rotate(-1)
            if lane.delayed and (due := [work for work in lane.delayed if work.not_before <= now]):
                lane.delayed = [work for work in lane.delayed if work.not_before > now]
                lane.ready.extend(due)
            if lane.ready and not (fresh and lane.ready[0].tries.tries):
                self._running += 1
                lane.running += 1
                return lane.ready.popleft()
        return None

    def _put_down(self, work: Work) -> None:
        self._running -= 1
        work.lane.running -= 1
        hand, work.hand = work.hand, None
        assert hand is not None, "it was started"
        hand.works -= 1
        if not hand.works:
            self._hands -= 1

    def finished(self, work: Work) -> None:
        """It is committed in the database; the offset moves if everything below is."""
        lane = work.lane
        with self._lock:
            self._put_down(work)
            lane.waiting -= 1
            lane.bytes_waiting -= work.bytes
            work.delivery = None
            of_key = lane.keys[work.key]
            of_key.popleft()
            if of_key:
                lane.ready.append(of_key[0])
            else:
                del lane.keys[work.key]
            while lane.works and lane.works[0].done:
                end = lane.works.popleft().offset + 1
                # Invariant: once closed, `end` stands still: somebody else decides about this partition.
                if not lane.closed:
                    lane.end = end

    def again(self, work: Work, seconds: float) -> None:
        """Nothing of it was committed: it stays first of its key, and runs again after ``seconds``."""
        with self._lock:
            self._put_down(work)
            work.not_before = time.monotonic() + seconds
            work.lane.delayed.append(work)

    def to_commit(self, lanes: Iterable[Lane]) -> list[tuple[Lane, int]]:
        """What of these has moved since it was last committed, counted as committed from now on."""
        found: list[tuple[Lane, int]] = []
        with self._lock:
            for lane in lanes:
                if not lane.closed and lane.end is not None and lane.end != lane.committed:
                    lane.committed = lane.end
                    found.append((lane, lane.end))
        return found

    def oldest(self) -> float | None:
        """Seconds since the arrival of the oldest delivery that is not done; None when there is none."""
        with self._lock:
            firsts = [lane.works[0].since for lane in self._lanes.values() if lane.works]
        return time.monotonic() - min(firsts) if firsts else None
