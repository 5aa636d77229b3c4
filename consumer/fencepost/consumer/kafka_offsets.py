"""Offsets of the assigned partitions: stored as positions first, then committed at the broker with a mark that says so.

Invariant: never more than the contiguous prefix of committed work, and never of a partition that was taken away. Used by the
poll loop alone, which waits for nothing here but in `flush`, and there for a few seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, cast

from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, TopicPartition

from fencepost.consumer.armed import reason
from fencepost.consumer.lanes import Lane, Lanes
from fencepost.consumer.positions import Place, Positions
from fencepost.schemas.errors import NotArmed, Restricted, StaleFence
from fencepost.schemas.transaction import driver_error

__all__ = ["Offsets"]

COMMIT_SECONDS = 0.25
# How often it is asked whether anything may be done, where nothing moves.
LOOK_SECONDS = 5.0
FLUSH_SECONDS = 5.0

log = logging.getLogger("fencepost.consumer.kafka")

OnCommit = Callable[[KafkaError | None, list[TopicPartition]], None]


class Offsets:
    """``held`` says why nothing may start now, ``doubt`` why this session has to end and begin anew; None otherwise."""

    def __init__(self, consumer: Consumer, lanes: Lanes, positions: Positions, on_commit: OnCommit) -> None:
        self._consumer = consumer
        self._lanes = lanes
        self._positions = positions
        self._on_commit = on_commit
        self.held: str | None = None
        self.doubt: str | None = None
        self._noting: tuple[Sequence[tuple[Lane, int]], Future[list[tuple[Any, ...]]]] | None = None
        self._at = 0.0
        self._look_at = time.monotonic() + LOOK_SECONDS

    @property
    def going(self) -> bool:
        """Whether handlers may be started; for any thread."""
        return self.held is None and self.doubt is None

    def take(self, places: Sequence[Place]) -> None:
        """These are ours from here on, each from where the database stands; where that is not told nothing of them is handled."""
        if not places:
            return
        try:
            starts = self._positions.starts(self._consumer, places)
        except Exception as error:  # noqa: BLE001  # of either client, or of a library around one
            self.doubt = f"where to read from was not told: {reason(error)}"
            return
        assigned: list[TopicPartition] = []
        for place, start in starts.items():
            log.info("%s/%d: assigned", place.topic, place.partition)
            self._lanes.assign(place.topic, place.partition, place.topic_id, start.known)
            offset = OFFSET_INVALID if start.offset is None else start.offset
            assigned.append(TopicPartition(place.topic, place.partition, offset))
        if any(start.offset is not None for start in starts.values()):
            self._consumer.incremental_assign(assigned)

    def tend(self) -> None:
        """One step: what is stored is committed, what has moved since is stored; at most once every COMMIT_SECONDS."""
        if self._noting is not None:
            if not self._noting[1].done():
                return
            self._noted(asynchronous=True)
        now = time.monotonic()
        if now < self._at or self.doubt is not None:
            return
        self._at = now + COMMIT_SECONDS
        ends = self._lanes.to_commit(self._lanes.all)
        if ends or now >= self._look_at or self.held is not None:
            self._note(ends)

    def flush(self, lanes: list[Lane]) -> None:
        """What is done of these is stored and committed on return; what cannot be in time is left to the next owner."""
        if self.doubt is not None:
            return
        until = time.monotonic() + FLUSH_SECONDS
        self._settle(until)
        if ends := self._lanes.to_commit(lanes):
            self._note(ends)
            self._settle(until)

    def _note(self, ends: Sequence[tuple[Lane, int]]) -> None:
        self._look_at = time.monotonic() + LOOK_SECONDS
        try:
            self._noting = ends, self._positions.note(ends)
        except RuntimeError:  # The executor is shut down: the process is ending.
            _undo(ends)

    def _settle(self, until: float) -> None:
        if self._noting is None:
            return
        ends, future = self._noting
        if wait([future], timeout=max(0.0, until - time.monotonic())).done:
            self._noted(asynchronous=False)
        else:
            self._noting = None
            _undo(ends)

    def _noted(self, *, asynchronous: bool) -> None:
        assert self._noting is not None
        (ends, future), self._noting = self._noting, None
        error = None if future.cancelled() else future.exception()
        if error is None and not future.cancelled():
            if self.held is not None:
                log.info("the database may be used again")
                self.held = None
            self._commit(ends, asynchronous=asynchronous)
            return
        _undo(ends)
        match error and (driver_error(error) or error):
            case StaleFence() as refused:
                self.doubt = reason(refused)
            case NotArmed() | Restricted() as refused:
                if self.held is None:
                    log.warning("nothing is handled for now: %s", reason(refused))
                self.held = reason(refused)
            case None:
                pass
            case other:
                log.warning("positions were not stored, nor their offsets committed: %s", reason(other))

    def _commit(self, ends: Sequence[tuple[Lane, int]], *, asynchronous: bool) -> None:
        mark = self._positions.mark
        # Invariant: once closed, a lane is somebody else's.
        offsets = [TopicPartition(lane.topic, lane.partition, end, mark) for lane, end in ends if not lane.closed]
        if not offsets:
            return
        # Crash here: [K2] stored, not committed.
        try:
            if asynchronous:
                self._consumer.commit(offsets=offsets, asynchronous=True)
            else:
                self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            self._on_commit(cast(KafkaError, error.args[0]), offsets)


def _undo(ends: Sequence[tuple[Lane, int]]) -> None:
    for lane, _ in ends:
        lane.committed = None
