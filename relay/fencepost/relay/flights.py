"""Flights: parts whose events were handed to the broker together, or set aside without asking it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import cast

from fencepost.relay.destination import Destination, NoRoute
from fencepost.relay.pages import Part
from fencepost.relay.parking import Parking
from fencepost.relay.publisher import OutboxRow, Outcome, Outgoing, ParkReason, Route
from fencepost.relay.slots import SlotLease


@dataclass(slots=True)
class Flight:
    """Parts whose events were handed to the broker together at `sent_at` (monotonic), and what was set aside instead.

    `doubtful` with a part of a slot that was stopped before.
    """

    parts: list[Part]
    batch: list[Outgoing]
    aside: list[Parking]
    sent_at: float
    answers: Future[list[Outcome]]
    doubtful: bool


def sort_out(
    parts: Sequence[Part], lease: SlotLease, destination: Destination | NoRoute
) -> tuple[list[Outgoing], list[Parking]]:
    """What of these parts is to be sent, and what is set aside: without a route, or behind a parked event of its key.

    What is not this destination's business, or was confirmed before, is in neither. The slots' `keys` and `read` move on.
    """
    batch: list[Outgoing] = []
    aside: list[Parking] = []
    for part in parts:
        held = lease.held[part.slot]
        held.read = part.after.copy()
        types = set(map(_TYPE, part.rows))
        routes = {type_: destination.route(type_) for type_ in types}
        if len(types) == 1 and not held.keys and not held.ahead:
            ((type_, route),) = routes.items()
            if route is not None and destination.answers_throughout(type_, part.rows):
                batch += map(_OUTGOING, zip(part.rows, repeat(route), strict=False))
                continue
        for row in part.rows:
            if row.seq in held.ahead or not destination.answers_for(row.type, row.seq):
                continue
            route = routes[row.type]
            if route is None:
                aside.append(Parking(row, ParkReason.NO_ROUTE))
                if destination.blocks:
                    held.keys.add((row.tenant, row.ordering_key))
            elif held.keys and destination.blocks and (row.tenant, row.ordering_key) in held.keys:
                aside.append(Parking(row, ParkReason.BEHIND))
            else:
                batch.append(Outgoing(row, route))
    return batch, aside


# Events by the hundred thousand: these run without a Python frame for each.
_TYPE: Callable[[OutboxRow], str] = itemgetter(OutboxRow._fields.index("type"))
_OUTGOING = cast(Callable[[tuple[OutboxRow, Route]], Outgoing], partial(tuple.__new__, Outgoing))  # pyright: ignore[reportUnknownMemberType]
