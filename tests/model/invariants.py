"""The invariants that one state or one step of the machine can break; what involves workers and provider is the world's.

I1 (who publishes and begins), I3, I4, I11 (what the provider accepted), I12 (who renews) and I16 (what a projector reaches)
are looked at in ``world``; I15 (nothing stays for ever without an owner) in ``explore``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from fencepost.jobs import machine
from fencepost.jobs import states as on
from fencepost.jobs.states import Guard, State

INVARIANTS = {
    "I1": "publish and begin only by the newest grant under the newest epoch of the witness",
    "I2": "at most one publication of a job",
    "I3": "an opaque effect is accepted at most once",
    "I4": "what the provider accepted has an effect row, or the job is suspect or the database disarmed",
    "I5": "a cancel changes no effect",
    "I6": "a running job has no unknown effect, and a pending one only of its own attempt",
    "I7": "a done job has no open effect",
    "I8": "no authority under an epoch older than the witness's",
    "I9": "no begin while frozen",
    "I10": "unknown is left by evidence only",
    "I11": "while armed, not applied means that the provider never accepted, applied that it did",
    "I12": "a lease is extended by its own attempt only",
    "I13": "epoch and generation never decrease while armed",
    "I14": "the same identity with another meaning changes nothing",
    "I15": "whatever stops has an owner, and done can be reached from everywhere",
    "I16": "a projector reaches no effect",
}

# Who uses authority; the rest is time, the outside world, or needs none.
AUTHORITY = (
    on.Claim
    | on.Renew
    | on.Begin
    | on.Record
    | on.Publish
    | on.Fail
    | on.GiveBack
    | on.Wait
    | on.Cancel
    | on.Reap
    | on.Deadline
    | on.Wake
    | on.Reconcile
    | on.Retry
    | on.Thaw
    | on.Release
)


def of_state(s: State, off: Collection[Guard]) -> tuple[str, ...]:
    """What this state of the database breaks by itself."""
    return tuple(_of_state(s, off))


def _of_state(s: State, off: Collection[Guard]) -> Iterator[str]:
    job = s.job
    if job is None:
        return
    for effect in s.effects:
        if job.exec == "running":
            if effect.state == "unknown" or effect.state == "pending" and effect.begun_by != job.attempt:
                yield "I6"
        elif job.exec == "done" and effect.state in on.OPEN and not effect.contradicted:
            yield "I7"
    other, _ = machine.step(s, on.Submit(meaning=job.meaning + 1), off)
    if other != s:
        yield "I14"


def of_step(before: State, event: on.Event, after: State, accepted: bool) -> tuple[str, ...]:
    """What this step breaks by itself."""
    return tuple(_of_step(before, event, after)) if accepted else ()


def _of_step(before: State, event: on.Event, after: State) -> Iterator[str]:
    was, now = before.job, after.job
    restored = isinstance(event, on.Restore)
    was_done = was is not None and was.exec == "done" and not restored
    if was_done and (now is None or now.exec != "done" or isinstance(event, on.Publish)):
        yield "I2"
    if isinstance(event, on.Cancel) and before.effects != after.effects:
        yield "I5"
    if isinstance(event, AUTHORITY) and before != after and before.authority.epoch < before.witness.epoch:
        yield "I8"
    if isinstance(event, on.Begin) and before != after and before.authority.frozen:
        yield "I9"
    left = any(b.state == "unknown" != a.state for b, a in zip(before.effects, after.effects, strict=True))
    if left and not isinstance(event, on.Restore | on.Record | on.Reconcile):
        yield "I10"
    if after.authority.armed and before.authority.armed:
        lower = was is not None and now is not None and now.generation < was.generation
        if lower or after.authority.epoch < before.authority.epoch:
            yield "I13"
