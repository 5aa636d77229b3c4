"""The application's worker, run by `fencepost worker run bench.chaos.app:worker`.

Settings: FENCEPOST_DATABASE, FENCEPOST_STATE; CHAOS_SEED, CHAOS_PROVIDER. Every worker has the same name: names prove nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from bench.chaos.domain import SAVE
from bench.chaos.plan import (
    BAD,
    EFFECT_SECONDS,
    EFFECTS,
    KEYED,
    LEASE,
    LOOKUP,
    NETWORK_SECONDS,
    OPAQUE,
    PLAIN,
    QUIET,
    STEPS,
    Kind,
    chance,
    computing,
    subject,
)

from fencepost.jobs.claim import Job, Policy
from fencepost.jobs.context import AsyncContext, Context
from fencepost.jobs.escalation import Reconciliation
from fencepost.jobs.http import http_effect
from fencepost.jobs.lookup import Answer, Asked, DidNotHappen, Inconclusive, Landed
from fencepost.jobs.publish import FencedTransaction
from fencepost.jobs.worker import Backoff, Poison, Retry, Worker
from fencepost.schemas.errors import LeaseLost, StaleFence

SEED = int(os.environ["CHAOS_SEED"])
PROVIDER = os.environ["CHAOS_PROVIDER"]
LOOK_UP_SECONDS = 5.0

client, async_client = httpx.Client(), httpx.AsyncClient()
worker = Worker(owner="chaos")


def url(request: Mapping[str, object] | bytes) -> str:
    """Where this effect is asked for."""
    assert not isinstance(request, bytes)
    return f"{PROVIDER}/effects/{request['kind']}"


def receipt(answer: httpx.Response) -> str:
    """The provider's reference."""
    found: str = answer.json()["receipt"]
    return found


call = http_effect(client, "POST", url, success={201}, receipt=receipt)
async_call = http_effect(async_client, "POST", url, success={201}, receipt=receipt)


def look_up(asked: Asked) -> Answer:
    """What the provider has under the key that the unknown begin sent."""
    seconds = min(asked.seconds_left(), LOOK_UP_SECONDS)
    answer = client.get(f"{PROVIDER}/receipts/{asked.request_key}", timeout=seconds)
    match answer.status_code:
        case 200:
            return Landed(receipt(answer), evidence_ref=f"receipts/{asked.request_key}")
        case 404:
            return DidNotHappen(f"receipts/{asked.request_key}")
        case _:
            return Inconclusive()


class Turn:
    """What this attempt of a job will do, by the seed."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def drawn(self, about: str) -> float:
        """A decision of this attempt."""
        return chance(SEED, about, self.job.operation, self.job.fence.generation)

    @property
    def seconds(self) -> float:
        """How long it computes; a lease that is shorter is renewed."""
        return computing(SEED, self.job.operation, self.job.fence.generation)

    def stumble(self, where: str) -> None:
        """Raises, one time in fifteen."""
        drawn = self.drawn(where)
        if drawn < 0.03:
            raise Retry("not_yet", after=0.05)
        if drawn < 0.06:
            raise RuntimeError("the handler failed")

    def request(self, effect_key: str, kind: Kind) -> dict[str, object]:
        """The same for every begin of an effect."""
        return {"subject": subject(self.job.operation, effect_key), "kind": kind}

    def saving(self, receipts: list[str], computed_by: str) -> Callable[[FencedTransaction], None]:
        """The publication: who wrote it is in the row."""
        values: dict[str, Any] = {
            "operation": self.job.operation,
            "class": self.job.job_class,
            "attempt": str(self.job.fence.attempt),
            "generation": self.job.fence.generation,
            "computed_by": computed_by,
            "receipts": receipts,
        }
        slow = self.drawn("slow publication") < 0.02

        def save(tx: FencedTransaction) -> None:
            tx.execute(SAVE, values)
            if slow:
                tx.execute("SELECT pg_sleep(0.3)")

        return save


def run(ctx: Context, job: Job) -> None:
    """Computes, or takes what an earlier attempt staged; then its effects; then the publication, or stages for the next."""
    turn = Turn(job)
    if job.json()["bad"]:
        raise Poison(BAD)
    staged = ctx.staged()
    if staged is None:
        time.sleep(turn.seconds)
    computed_by = str(job.fence.attempt) if staged is None else str(staged.result["by"])
    receipts: list[str] = []
    for key, kind in EFFECTS[job.job_class]:
        turn.stumble(f"before {key}")
        receipts.append(ctx.effect(key, call, turn.request(key, kind), kind=kind).receipt)
    turn.stumble("before publishing")
    try:
        ctx.publish(turn.saving(receipts, computed_by))
    except (StaleFence, LeaseLost):
        ctx.stage({"by": computed_by})
        raise
    if turn.drawn("after") < 0.02:
        raise RuntimeError("the handler failed after it had published")


async def run_async(ctx: AsyncContext, job: Job) -> None:
    """The same on the event loop."""
    turn = Turn(job)
    await asyncio.sleep(turn.seconds)
    receipts: list[str] = []
    for key, kind in EFFECTS[job.job_class]:
        turn.stumble(f"before {key}")
        receipts.append((await ctx.effect(key, async_call, turn.request(key, kind), kind=kind)).receipt)
    turn.stumble("before publishing")
    if job.job_class != QUIET:
        await ctx.publish(turn.saving(receipts, str(job.fence.attempt)))


def settings(policy: Policy) -> dict[str, Any]:
    """Of every class here: budgets that chaos does not use up as a rule, and leases that it outlives."""
    return {
        "lease": LEASE,
        "max_attempts": 30,
        "max_finishes": 30,
        "policy": policy,
        "backoff": Backoff(0.05, 0.5),
        "max_effect_timeout": EFFECT_SECONDS,
        "network_bound": NETWORK_SECONDS,
    }


looked_up = Reconciliation("chaos-desk", look_up=look_up)
worker.job(PLAIN, **settings("strict"))(run)
worker.job(KEYED, reconciliation=looked_up, **settings("strict"))(run)
worker.job(STEPS, reconciliation=looked_up, **settings("resumable"))(run)
worker.job(LOOKUP, reconciliation=looked_up, **settings("strict"))(run_async)
worker.job(OPAQUE, reconciliation=Reconciliation("chaos-desk"), **settings("strict"))(run_async)
worker.job(QUIET, **settings("strict"))(run_async)
