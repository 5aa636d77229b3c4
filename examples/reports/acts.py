"""The acts of the demo: each one makes something go wrong on purpose and shows what the database says of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fencepost.jobs.effects import idempotency_key
from fencepost.schemas.errors import Unreachable

from . import app, statements
from .client import Provider
from .documents import Document
from .domain import Submission
from .narrator import DemoFailed, Narrator
from .scene import DESTINATION, Scene

__all__ = ["LOST", "Director"]

WAIT_SECONDS = 40.0
SETTLE_SECONDS = 60.0
WHICH = {"destination": DESTINATION, "consumer": app.CONSUMER}
LOST = {
    "drop": "accepts the request, then cuts the line",
    "fail": "answers with status 500",
    "hang": "does not answer at all",
    "refuse": "says no, and yes when asked again",
}


class Backed(Exception):
    """Raised on purpose, to roll a transaction back."""


@dataclass(frozen=True, slots=True)
class Director:
    """Runs the acts in order; every one raises DemoFailed when something is not as it must be."""

    scene: Scene
    narrator: Narrator
    provider: Provider
    run: str

    def submission(self, document: Document) -> Submission:
        """An identity of this run for a document."""
        return Submission(f"{self.run}-{document.package}-{document.sha256[:6]}".lower(), document)

    # -- acceptance and delivery -------------------------------------------------------------------------------------

    def accept_together_or_not_at_all(self, submissions: list[Submission], unlucky: Submission) -> None:
        """The domain change and its event in one commit; a rolled back one leaves neither."""
        say = self.narrator
        say.act("Accepted: the document and its event commit together, or neither does")
        relay = self.scene.process("relay-1")
        say.until("the relay owns every slot", self._slots_are_owned, WAIT_SECONDS)
        relay.pause()
        for submission in submissions:
            self.accept(submission)
        try:
            with self.scene.connect(autocommit=False) as conn, conn.transaction():
                app.accept(conn, unlucky)
                raise Backed
        except Backed:
            pass
        stored, events = self.scene.number(statements.SUBMISSIONS), self.scene.number(statements.EVENTS)
        self._require(stored == events == len(submissions), f"{stored} submissions, {events} events")
        say.seen(f"{stored} real documents accepted, {events} events in the same commits")
        left = self.scene.number(statements.ROLLED_BACK, operation=unlucky.submission_id)
        self._require(left == 0, f"{left} rows are left of a transaction that was rolled back")
        say.seen(f"{unlucky.document.name}: rolled back on purpose, and neither row nor event is left of it")

    def _slots_are_owned(self) -> bool:
        slots = self.scene.number(statements.SLOTS, **WHICH)
        return slots > 0 and self.scene.number(statements.SLOTS_OWNED, **WHICH) == slots

    def accept(self, submission: Submission) -> None:
        """One acceptance in a transaction of its own."""
        with self.scene.connect(autocommit=False) as conn, conn.transaction():
            app.accept(conn, submission)

    def kill_the_relay_between_confirm_and_ack(self, number: int) -> None:
        """The broker has everything, the database does not know it yet: the next relay sends everything again."""
        say = self.narrator
        say.act("Relay killed with SIGKILL between the broker's confirm and the ack")
        acks = self.scene.number(statements.ACKS, **WHICH)
        with self.scene.connect(autocommit=False) as holder:
            holder.execute(statements.HOLD_ACKS, WHICH)
            say.say("the director locks the slots, so that the relay's next ack has to wait")
            self.scene.process("relay-1").resume()
            say.until("the relay has every confirm and waits to record it", self._ack_waits, WAIT_SECONDS)
            there = say.until("the broker has every event", lambda: self.scene.at_broker(number), WAIT_SECONDS)
            recorded = self.scene.number(statements.ACKS, **WHICH) - acks
            say.seen(f"the broker has confirmed {there} messages; acks recorded of them: {recorded}")
            self.scene.kill("relay-1")
            say.until("the database has noticed the dead relay", lambda: not self._ack_waits(), WAIT_SECONDS)
        recorded = self.scene.number(statements.ACKS, **WHICH) - acks
        self._require(recorded == 0, f"{recorded} acks were recorded by a relay that was killed before its ack")
        say.seen("SIGKILL: nothing was recorded, so nothing counts as published")
        self.scene.start("relay-2", "relay", "run")
        say.say("a second relay starts; it takes the slots over when the dead one's lease is over")

    def _ack_waits(self) -> bool:
        return self.scene.number(statements.ACK_WAITS) > 0

    def absorb_duplicates(self, number: int) -> None:
        """Every event arrives twice, and is handled once."""
        say = self.narrator
        say.act("Duplicates absorbed by the inbox")
        say.count("deliveries", 2 * number, lambda: self.scene.number(statements.DELIVERIES, **WHICH), WAIT_SECONDS)
        arrived = self.scene.number(statements.DELIVERIES, **WHICH)
        reserved = self.scene.number(statements.RESERVATIONS, **WHICH)
        self._require(reserved == number, f"{reserved} reservations for {number} events")
        say.seen(
            f"{arrived} deliveries of {number} events: {reserved} handled, {arrived - reserved} duplicates absorbed"
        )

    # -- execution ---------------------------------------------------------------------------------------------------

    def publish_reports(self, submissions: list[Submission]) -> None:
        """The ordinary case: analysed, summarised, published."""
        say = self.narrator
        say.act("Reports: analysed, summarised by the provider, published behind the fence")
        self.until_done(submissions)
        with self.scene.connect() as conn:
            for name, family, words, ease, frequent in conn.execute(statements.RESULTS, {"limit": 4}):
                say.say(f"{name}: {family}, {words} words, reading ease {ease} ({frequent})")
        say.seen(f"{len(submissions)} reports published")

    def until_done(self, submissions: list[Submission]) -> None:
        """Waits for these; a job that is set aside meanwhile ends the demo with its reason."""
        operations = [s.submission_id for s in submissions]

        def done() -> int:
            self._refuse_stuck(operations)
            return self.scene.number(statements.DONE, operations=operations)

        self.narrator.count("reports published", len(operations), done, WAIT_SECONDS)

    def _refuse_stuck(self, operations: list[str]) -> None:
        """Ends the demo with what happened and how things stand, once jobs are set aside instead of done."""
        stuck = self._stuck(operations)
        if not stuck:
            return
        deadline = time.monotonic() + SETTLE_SECONDS
        done = self.scene.number(statements.DONE, operations=operations)
        while len(stuck) + done < len(operations) and time.monotonic() < deadline:
            time.sleep(0.1)
            stuck = self._stuck(operations)
            done = self.scene.number(statements.DONE, operations=operations)
        _, state, reason, detail, attempts = stuck[0]
        because = f"{reason}, {detail}" if detail else reason
        meaning = {
            "poison": "no request was sent, so nothing is in doubt; they run again after `fencepost jobs retry`",
            "blocked": "a request may have arrived, so nobody sends it again before `fencepost effects reconcile`",
        }[state]
        raise DemoFailed(
            f"{self.provider_says()}. {len(operations)} submissions were accepted, delivered and handed over; {done} are"
            f" published; {len(stuck)} jobs are {state} after {attempts} attempts ({because}): {meaning}"
        )

    def _stuck(self, operations: list[str]) -> list[tuple[str, str, str, str, int]]:
        with self.scene.connect() as conn:
            return conn.execute(statements.STUCK, {"operations": operations}).fetchall()

    def provider_says(self) -> str:
        """What the provider is like right now, in words."""
        try:
            asked = self.provider.requests()
        except Unreachable as error:
            return str(error)
        return f"the provider at {self.provider.url} answers, and was asked {sum(asked.values())} times"

    def pause_a_worker_past_its_lease(self, submission: Submission) -> None:
        """Its late publication is refused, its computation staged; the successor publishes under its own fence."""
        say, operation = self.narrator, submission.submission_id
        say.act("A worker is paused with SIGSTOP past its lease")
        self.provider.plan(operation, style=["hold", "hold"])
        self.accept(submission)
        say.until(
            "worker-1 has its summary and is about to publish", lambda: len(self.provider.held()) == 1, WAIT_SECONDS
        )
        _, owner, generation, _ = self._job(operation)
        self._require(owner == "worker-1", f"the job is run by {owner}")
        self.scene.process("worker-1").pause()
        say.seen(f"worker-1 holds {operation} (generation {generation}) and is stopped; nobody renews its lease now")
        self.scene.start("worker-2", "worker", "run", "reports.app:worker", "--concurrency", "2")
        say.until(
            "the lease is over and worker-2 has claimed the job",
            lambda: self._job(operation)[1] == "worker-2",
            WAIT_SECONDS,
        )
        say.until("worker-2 is where worker-1 was stopped", lambda: len(self.provider.held()) == 2, WAIT_SECONDS)
        _, owner, later, _ = self._job(operation)
        say.seen(
            f"{owner} took over under generation {later}; the provider was asked {self._asked(operation)} time in all"
        )
        self.scene.process("worker-1").resume()
        self.provider.release()
        say.until("worker-1 was refused and has staged its result", lambda: self._staged(operation), WAIT_SECONDS)
        refusal = next((line for line in self.scene.log("worker-1").splitlines() if "refused: " in line), "")
        self._require(bool(refusal), "worker-1 did not log its refusal")
        say.seen("worker-1 woke up, went on, and was refused by PostgreSQL:")
        say.quote(refusal.partition("WARNING ")[2])
        self.provider.release()
        self.until_done([submission])
        with self.scene.connect() as conn:
            published = conn.execute(statements.REPORT, {"operation": operation}).fetchall()
        self._require(len(published) == 1, f"{operation} was published {len(published)} times")
        worker, generation, computed_by = published[0]
        self._require(worker == "worker-2" and computed_by == "worker-1", f"published by {worker}, from {computed_by}")
        say.seen(f"published once: by {worker} under generation {generation}, from what {computed_by} had staged")

    def _job(self, operation: str) -> tuple[str, str, int, bool]:
        with self.scene.connect() as conn:
            row = conn.execute(statements.JOB, {"operation": operation}).fetchone()
        return ("", "", 0, False) if row is None else (str(row[0]), str(row[1]), int(row[2]), bool(row[3]))

    def _staged(self, operation: str) -> bool:
        return self.scene.number(statements.STAGED, operation=operation) > 0

    def _asked(self, operation: str) -> int:
        return self.provider.requests().get(operation, 0)

    # -- effects -----------------------------------------------------------------------------------------------------

    def lose_replies(self, submissions: dict[str, Submission]) -> None:
        """What is not known stays unknown: not sent again, not timed out into an answer."""
        say = self.narrator
        say.act("Replies get lost: an effect without an answer stays unknown")
        for behaviour, submission in submissions.items():
            self.provider.plan(submission.submission_id, summaries=[behaviour])
            say.say(f"for {submission.submission_id} the provider {LOST[behaviour]}")
            self.accept(submission)
        lost = {b: s for b, s in submissions.items() if b != "refuse"}
        say.count("effects unknown", len(lost), lambda: len(self._unknown(lost)), WAIT_SECONDS)
        self.until_done([submissions["refuse"]])
        say.seen("the refusal was definite: that one was tried again, and is published")
        listed = self.scene.command("effects", "list")
        self._require(listed.code == 0 and listed.text.count("unknown") >= len(lost), listed.text)
        say.say("`fencepost effects list`:")
        say.quote(listed.text)
        asked = {b: self._asked(s.submission_id) for b, s in lost.items()}
        self._require(set(asked.values()) == {1}, f"requests at the provider: {asked}")
        say.seen("each of them was sent once, and nobody sends it again: their jobs are blocked")

    def reconcile(self, submissions: dict[str, Submission]) -> None:
        """Evidence settles them: the provider's ledger knows which request arrived."""
        say = self.narrator
        say.act("Reconciled by receipt look-up")
        lost = {s.submission_id: b for b, s in submissions.items() if b != "refuse"}
        for operation, version in self._unknown({b: submissions[b] for b in lost.values()}).items():
            key = idempotency_key(app.TENANT, operation, app.EFFECT)
            receipt = self.provider.receipt(key)
            verdict = (
                ("--verdict", "not-applied") if receipt is None else ("--verdict", "applied", "--receipt", receipt)
            )
            words = (
                "--tenant",
                app.TENANT,
                "--operation",
                operation,
                "--effect",
                app.EFFECT,
                "--version",
                str(version),
            )
            evidence = ("--evidence-kind", "receipt_lookup", "--evidence-ref", f"{self.provider.url}/summaries/{key}")
            why = ("--actor", "demo", "--reason", "looked up at the provider")
            known = "nothing was accepted" if receipt is None else f"accepted, receipt {receipt}"
            say.say(f"{operation}: the provider says {known}")

            def settle(arguments: tuple[str, ...] = (*words, *verdict, *evidence, *why)) -> bool:
                done = self.scene.command("effects", "reconcile", *arguments)
                say.quote(done.text)
                # Refused for as long as the call may still be under way.
                self._require(done.code == 0 or "still be under way" in done.text, done.text)
                return done.code == 0

            say.until(f"{operation} is settled", settle, WAIT_SECONDS)
        self.until_done(list(submissions.values()))
        asked = {b: self._asked(s.submission_id) for b, s in submissions.items()}
        self._require(asked["drop"] == 1, f"the accepted request was sent {asked['drop']} times")
        say.seen(
            "the accepted one was published with its receipt, without asking again; the others were asked once more"
        )

    def _unknown(self, submissions: dict[str, Submission]) -> dict[str, int]:
        operations = [s.submission_id for s in submissions.values()]
        with self.scene.connect() as conn:
            rows = conn.execute(statements.EFFECTS, {"operations": operations}).fetchall()
        return {str(operation): int(version) for operation, state, version, _ in rows if state == "unknown"}

    # -- the end -----------------------------------------------------------------------------------------------------

    def until_everything_is_told(self, total: int) -> None:
        """The events of the publications went the same way back, through outbox, relay and inbox."""
        self.narrator.count(
            "publications told", total, lambda: self.scene.number(statements.PUBLISHED_SEEN), WAIT_SECONDS
        )
        self.narrator.seen(f"{total} events of publications went through outbox, relay and inbox as well")

    def _require(self, true: bool, words: str) -> None:
        if not true:
            raise DemoFailed(words)
