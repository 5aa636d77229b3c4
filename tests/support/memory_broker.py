"""Publishers for tests of the relay itself: they confirm, refuse or stay silent as told, and keep what arrived, in order.

The broker's own behaviour is the conformance suite's business; here the ledger is the oracle of arrivals.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import LiteralString

import psycopg

from fencepost.relay.publisher import CONFIRMED, WITHHELD, Answer, OutboxRow, Outcome, Outgoing
from fencepost.schemas.kafka_binding import encoder, key

LEDGER: LiteralString = """
CREATE TABLE arrival (n bigint GENERATED ALWAYS AS IDENTITY, relay text NOT NULL, tenant text NOT NULL,
    operation text NOT NULL, wire bytea NOT NULL)"""
ARRIVED: LiteralString = """
INSERT INTO arrival (relay, tenant, operation, wire) VALUES (%(relay)s, %(tenant)s, %(operation)s, %(wire)s)"""

Verdict = Callable[[OutboxRow], Outcome]


def confirm(row: OutboxRow) -> Outcome:
    """Confirms everything."""
    return CONFIRMED


class Lossy:
    """Does not store the events of these operations until told otherwise, as a connection that is cut does not."""

    def __init__(self, *operations: str) -> None:
        self.lost = set(operations)
        self.once = True

    def __call__(self, row: OutboxRow) -> Outcome:
        if row.operation in self.lost:
            if self.once:
                self.lost.remove(row.operation)
            return Outcome(Answer.NACKED, detail="cut")
        return CONFIRMED


class MemoryBroker:
    """Keeps in `arrived` what it confirmed or left unknown; `verdict` answers for each event.

    After an answer that is no confirm, later events of that key in the same send are withheld (`withholding`). While
    `answering` is cleared, what is sent has arrived and its answers wait.
    """

    def __init__(self, verdict: Verdict = confirm, *, withholding: bool = True) -> None:
        self.verdict = verdict
        self.withholding = withholding
        self.arrived: list[OutboxRow] = []
        self.sends = 0
        self.answering = threading.Event()
        self.answering.set()

    def open(self, deadline: float) -> None:
        """Nothing to connect to."""

    def send(self, batch: Sequence[Outgoing], deadline: float) -> Future[list[Outcome]]:
        self.sends += 1
        outcomes: list[Outcome] = []
        stopped: set[tuple[str, str]] = set()
        for row, _ in batch:
            lane = (row.tenant, row.ordering_key)
            outcome = WITHHELD if self.withholding and lane in stopped else self.verdict(row)
            if outcome.answer in (Answer.CONFIRMED, Answer.UNKNOWN):
                self.arrived.append(row)
            if outcome.answer is not Answer.CONFIRMED:
                stopped.add(lane)
            outcomes.append(outcome)
        future: Future[list[Outcome]] = Future()
        if self.answering.is_set():
            future.set_result(outcomes)
        else:
            threading.Thread(target=self._later, args=(future, outcomes), daemon=True).start()
        return future

    def close(self, deadline: float) -> None:
        """Nothing to leave."""

    def operations(self) -> list[str]:
        """The operations that arrived, in order, copies included."""
        return [row.operation for row in self.arrived]

    def _later(self, future: Future[list[Outcome]], outcomes: list[Outcome]) -> None:
        if self.answering.wait(30):
            future.set_result(outcomes)


class LedgerBroker:
    """Writes every byte that a consumer would see into the table of `LEDGER`, and confirms once that has committed.

    At send number `dies_at` the process kills itself between that commit and its confirm.
    """

    def __init__(self, dsn: str, relay: str, source: str, *, dies_at: int = 0) -> None:
        self._dsn = dsn
        self._relay = relay
        self._encode = encoder(source)
        self._left = dies_at

    def open(self, deadline: float) -> None:
        """Connects for each send."""

    def send(self, batch: Sequence[Outgoing], deadline: float) -> Future[list[Outcome]]:
        with psycopg.connect(self._dsn, connect_timeout=5) as conn:
            for row, _ in batch:
                arrived = {"relay": self._relay, "tenant": row.tenant, "operation": row.operation}
                conn.execute(ARRIVED, {**arrived, "wire": self._wire(row)})
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        future: Future[list[Outcome]] = Future()
        future.set_result([CONFIRMED] * len(batch))
        return future

    def close(self, deadline: float) -> None:
        """Nothing to leave."""

    def _wire(self, row: OutboxRow) -> bytes:
        attributes: dict[str, str] | None = None if row.attributes is None else json.loads(row.attributes)
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
            attributes,
        )
        return repr((key(row.tenant, row.ordering_key), headers, row.payload)).encode()
