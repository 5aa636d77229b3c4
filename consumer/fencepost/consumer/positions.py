"""Positions: everything below a stored one is committed in the database that stores it, and the broker never knows of a higher one first.

So a broker that says more than the database does says that the database was restored, and reading goes back to where the
database stands; its inbox recognises what it still knows. An offset that somebody else has set, with Kafka's own tools or
another client, carries no mark of ours and is followed.

Crash here (K2): the position is stored, the offset not committed. The next owner reads from the offset, and finds duplicates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, LiteralString, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition

from fencepost.consumer.armed import READ_SECONDS, Fetch, Point
from fencepost.consumer.lanes import Lane

__all__ = ["Place", "Positions", "Start"]

# The newest first.
STORED: LiteralString = """
SELECT p.topic, p.partition, p.topic_id, p.next FROM fencepost.consumer_position AS p
WHERE p.consumer = %(consumer)s AND p.cluster = %(cluster)s AND p.consumer_group = %(group)s
  AND p.topic = ANY (%(topics)s::text[])
ORDER BY p.noted_at DESC"""
NOTE: LiteralString = """
SELECT fencepost.note_positions(
    %(consumer)s, %(cluster)s, %(group)s, %(recovered)s,
    %(topics)s::text[], %(topic_ids)s::text[], %(partitions)s::integer[], %(nexts)s::bigint[])"""

AGAIN_SECONDS = 0.2

log = logging.getLogger("fencepost.consumer.positions")


class Place(NamedTuple):
    """One partition of one topic, told from an earlier topic of its name by the id."""

    topic: str
    partition: int
    topic_id: str


class Start(NamedTuple):
    """Where to read from: ``offset`` where it is not the broker's, ``known`` where everything below is handled here."""

    offset: int | None
    known: int | None


class Positions:
    """The positions of one consumer in one group of one cluster, for one session of its runner."""

    def __init__(self, consumer: str, group: str, cluster: str, fetch: Fetch, point: Point) -> None:
        self._consumer = consumer
        self._where = {"consumer": consumer, "cluster": cluster, "group": group}
        self._fetch = fetch
        self._recovered = point.recovered
        # What an offset of ours says of itself: whose work below it is done, and in which installation.
        self.mark = f"fencepost {point.installation} {consumer}"

    def starts(self, consumer: Consumer, places: Sequence[Place]) -> dict[Place, Start]:
        """Where each partition is to be read from; raises when broker or database do not say it within ``READ_SECONDS``."""
        until = time.monotonic() + READ_SECONDS
        stored = self._stored(places, until)
        asked = [TopicPartition(place.topic, place.partition) for place in places]
        answers = consumer.committed(asked, timeout=max(1.0, until - time.monotonic()))
        committed = {(each.topic, each.partition): each for each in answers}
        found: dict[Place, Start] = {}
        for place in places:
            answer = committed[place.topic, place.partition]
            if answer.error is not None:
                raise KafkaException(answer.error)
            if answer.offset < 0:
                found[place] = Start(None, None)
            elif answer.metadata != self.mark:
                # Invariant: told as known before anything of it is handled, so that a later restore goes back no further.
                found[place] = Start(None, answer.offset)
            elif (position := stored.get(place)) is not None and position >= answer.offset:
                found[place] = Start(None, None)
            else:
                found[place] = Start(self._back(consumer, place, position, answer.offset), position)
        return found

    def note(self, ends: Sequence[tuple[Lane, int]]) -> Future[list[tuple[Any, ...]]]:
        """Starts to store these; without any, asks only whether they could be stored.

        The answer is NotArmed while nobody may act, StaleFence when the database was recovered since this session began.
        """
        values = {
            "recovered": self._recovered,
            "topics": [lane.topic for lane, _ in ends],
            "topic_ids": [lane.topic_id for lane, _ in ends],
            "partitions": [lane.partition for lane, _ in ends],
            "nexts": [end for _, end in ends],
        }
        return self._fetch(NOTE, self._where | values)

    def _stored(self, places: Sequence[Place], until: float) -> dict[Place, int]:
        """The position of each; where a broker did not tell the id of a topic, the newest of its name counts."""
        values = {**self._where, "topics": sorted({place.topic for place in places})}
        while True:
            try:
                rows = self._fetch(STORED, values).result(timeout=max(0.1, until - time.monotonic()))
                break
            except Exception:
                if time.monotonic() + AGAIN_SECONDS >= until:
                    raise
                time.sleep(AGAIN_SECONDS)
        found: dict[Place, int] = {}
        for place in places:
            of_it = [
                (topic_id, position) for topic, partition, topic_id, position in rows if (topic, partition) == place[:2]
            ]
            exact = [position for topic_id, position in of_it if topic_id == place.topic_id]
            untold = [position for topic_id, position in of_it if not place.topic_id or not topic_id]
            if exact or untold:
                found[place] = (exact or untold)[0]
        return found

    def _back(self, consumer: Consumer, place: Place, position: int | None, offset: int) -> int:
        log.warning(
            "%s: %s/%d is done up to %s here and up to %d at the broker: this database was restored; reading from there again",
            self._consumer,
            place.topic,
            place.partition,
            "nothing" if position is None else position,
            offset,
        )
        if position is None:
            return OFFSET_BEGINNING
        with suppress(KafkaException):
            low, _ = consumer.get_watermark_offsets(TopicPartition(place.topic, place.partition), timeout=READ_SECONDS)
            if low > position:
                log.error(
                    "%s: %s/%d begins at %d only: the broker keeps nothing of what this database has lost below; "
                    "it has to be sent again: fencepost relay backfill",
                    self._consumer,
                    place.topic,
                    place.partition,
                    low,
                )
                return low
        return position
