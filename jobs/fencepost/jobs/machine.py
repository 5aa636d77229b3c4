"""The state machine of jobs, effects and authority as one pure function: (state, event) to (state, actions).

A refusal changes nothing. There is no clock: that a lease has ended or a call can no longer be under way is an event. Each
guard can be switched off by its name, which is how the explorer shows what it is there for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NoReturn, assert_never

from fencepost.jobs import states as on
from fencepost.jobs.states import (
    AGAIN,
    APPLIED,
    OPEN,
    Action,
    Authority,
    Effect,
    EffectState,
    Event,
    Exec,
    Grant,
    Guard,
    Hold,
    Job,
    State,
    Witness,
)

__all__ = ["holds", "step"]

Off = Collection[Guard]
Step = tuple[State, tuple[Action, ...]]
NONE: Off = frozenset()


def step(state: State, event: Event, off: Off = NONE) -> Step:
    """The next state and what follows from the event; a refused event leaves the state as it was."""
    try:
        if Guard.ACCEPTS in off:
            _refuse("ZF000", "everything")
        return _step(state, event, off)
    except _Refusal as refusal:
        return state, (refusal.refused,)


def holds(state: State) -> tuple[Hold, ...]:
    """Why the job does not proceed by itself, each with its owner; empty when it is done or will proceed."""
    job, authority = state.job, state.authority
    found: list[Hold] = []
    if not authority.armed and not (authority.tip and state.witness.reachable):
        found.append(Hold("disarmed" if not authority.tip else "witness unreachable", "authority admin"))
    if job is None or job.exec == "done":
        return tuple(found)
    if authority.frozen:
        found.append(Hold("frozen", "authority admin"))
    if job.exec == "held" or job.epoch < authority.epoch and job.exec in ("queued", "waiting"):
        found.append(Hold("held under an old epoch", "authority admin"))
    if job.exec == "poison":
        found.append(Hold("poison", "operator"))
    if job.exec == "waiting" and not job.signalled:
        found.append(Hold("waiting", "sender of the signal"))
    for effect in state.effects:
        if effect.state == "unknown":
            found.append(Hold("effect unknown", "reconciler, escalated" if effect.escalated else "reconciler"))
        elif effect.state == "none" and job.suspect:
            found.append(Hold("effect suspect", "reconciler"))
    return tuple(found)


class _Refusal(Exception):
    def __init__(self, refused: on.Refused) -> None:
        self.refused = refused


def _refuse(code: str, part: str) -> NoReturn:
    raise _Refusal(on.Refused(code, part))


def _armed(s: State, off: Off) -> None:
    if not s.authority.armed and Guard.ARMED not in off:
        _refuse("ZF001", "armed")


def _job(s: State) -> Job:
    return s.job or _refuse("ZF050", "operation")


def _fence(s: State, g: Grant, off: Off) -> Job:
    """The whole comparison, in the order in which refusals name the first part that differs."""
    _armed(s, off)
    job = s.job or _refuse("ZF020", "operation")
    parts: tuple[tuple[Guard, str, bool], ...] = (
        (Guard.FENCE_STATE, "state", job.exec == "running"),
        (Guard.FENCE_GENERATION, "generation", job.generation == g.generation),
        (Guard.FENCE_ATTEMPT, "attempt", job.attempt == g.attempt),
        (Guard.FENCE_OWNER, "owner", job.owner == g.owner),
        (Guard.FENCE_EPOCH, "epoch", job.epoch == g.epoch == s.authority.epoch),
        (Guard.FENCE_LEASE, "lease", not job.expired),
    )
    for guard, part, equal in parts:
        if not equal and guard not in off:
            _refuse("ZF020", part)
    return job


def _gone(job: Job, to: Exec) -> Job:
    """Taken away from its attempt."""
    return replace(job, exec=to, generation=job.generation + 1, attempt=None, owner=None, expired=False)


def _put(s: State, key: int, effect: Effect) -> State:
    return replace(s, effects=(*s.effects[:key], effect, *s.effects[key + 1 :]))


def _effect(s: State, key: int, effect: Effect) -> State:
    """The effect as it has become: every change of its state is a new version."""
    return _put(s, key, replace(effect, version=effect.version + 1))


def _forget(s: State, key: int, off: Off = NONE) -> State:
    """Nobody knows any more what became of a pending effect."""
    become: EffectState = "failed_before_dispatch" if Guard.LEAVE_UNKNOWN in off else "unknown"
    return _effect(s, key, replace(s.effects[key], state=become))


def _due(s: State, job: Job) -> Exec:
    """What a job without open effects becomes: queued, or poison when its budget is used up."""
    finish = s.job_class.policy == "strict" and s.applied_effects > 0
    used_up = job.finishes >= s.job_class.max_finishes if finish else job.attempts >= s.job_class.max_attempts
    return "poison" if used_up else "queued"


def _uncharged(job: Job) -> Job:
    if job.mode == "finish":
        return replace(job, finishes=max(job.finishes - 1, 0))
    return replace(job, attempts=max(job.attempts - 1, 0))


def _leave(s: State, job: Job, off: Off) -> Step:
    """An attempt ends without a result: what it left pending is unknown and blocks, else the job is queued or poison."""
    for key, effect in enumerate(s.effects):
        if effect.state == "pending":
            s = _forget(s, key, off)
    become: Exec = "blocked" if s.open_effects else _due(s, job)
    return replace(s, job=_gone(job, become)), (on.Told(become),)


def _settle(s: State, off: Off) -> State:
    """A blocked job goes on once its last open effect is settled."""
    job = _job(s)
    if job.exec == "blocked" and not s.open_effects:
        become: Exec = "queued" if Guard.SETTLE_BUDGET in off else _due(s, job)
        return replace(s, job=replace(job, exec=become))
    return s


def _step(s: State, event: Event, off: Off) -> Step:
    match event:
        case on.Submit():
            return _submit(s, event, off)
        case on.Claim():
            return _claim(s, event, off)
        case on.Renew(grant):
            job = _job(s) if Guard.RENEW_FENCE in off else _fence(s, grant, off)
            return replace(s, job=replace(job, expired=False)), ()
        case on.Begin():
            return _begin(s, event, off)
        case on.Record():
            return _record(s, event, off)
        case on.Publish():
            return _publish(s, event, off)
        case on.Fail(grant, final):
            job = _fence(s, grant, off)
            if final and not s.open_effects:
                return replace(s, job=_gone(job, "poison")), (on.Told("poison"),)
            return _leave(s, job, off)
        case on.GiveBack(grant):
            job = _fence(s, grant, off)
            return _leave(s, job if s.open_effects else _uncharged(job), off)
        case on.Wait(grant):
            job = _fence(s, grant, off)
            if s.open_effects:
                _refuse("ZF030", "effect")
            if job.signalled:
                return s, (on.Told("signalled"),)
            return replace(s, job=_uncharged(_gone(job, "waiting"))), (on.Told("waiting"),)
        case on.Signal():
            job = _job(s)
            if job.exec == "done":
                return s, (on.Told("too_late"),)
            heard = Guard.SIGNAL_KEPT not in off or job.exec == "waiting"
            return (replace(s, job=replace(job, signalled=True)) if heard else s), (on.Told("recorded"),)
        case on.Cancel():
            return _cancel(s, off)
        case on.LeaseEnds():
            running = s.job is not None and s.job.exec == "running"
            return (replace(s, job=replace(s.job, expired=True)) if s.job and running else s), ()
        case on.Quiesces(key):
            return _put(s, key, replace(s.effects[key], quiescent=True)), ()
        case on.Reap():
            _armed(s, off)
            if s.job is None or s.job.exec != "running" or not s.job.expired:
                return s, (on.Told("nothing"),)
            return _leave(s, s.job, off)
        case on.Deadline(key):
            _armed(s, off)
            effect, job = s.effects[key], _job(s)
            passed = effect.quiescent or Guard.DEADLINE_OWN in off
            forgotten = effect.state == "pending" and passed and job.exec != "running"
            return (_forget(s, key) if forgotten else s), ()
        case on.Wake():
            _armed(s, off)
            if s.job is None or s.job.exec != "waiting" or not s.job.signalled:
                return s, (on.Told("nothing"),)
            return replace(s, job=replace(s.job, exec="queued")), (on.Told("queued"),)
        case on.Escalate(key):
            effect = s.effects[key]
            if effect.state != "unknown":
                return s, (on.Told("nothing"),)
            if Guard.ESCALATE_TELLS in off:
                return _settle(_effect(s, key, replace(effect, state="resolved_not_applied")), off), ()
            return _put(s, key, replace(effect, escalated=True)), (on.Alert("effect unknown for too long"),)
        case on.LookupTimesOut(key):
            if Guard.EVIDENCE in off and s.effects[key].state == "unknown":
                return _settle(_effect(s, key, replace(s.effects[key], state="resolved_not_applied")), off), ()
            return s, (on.Told("inconclusive"),)
        case on.Reconcile():
            return _reconcile(s, event, off)
        case on.Retry():
            _armed(s, off)
            job = _job(s)
            if job.exec not in ("poison", "cancelled"):
                _refuse("ZF020", "state")
            if s.open_effects and Guard.RETRY_CLOSED not in off:
                _refuse("ZF030", "effect")
            return replace(s, job=replace(_gone(job, "queued"), attempts=0, finishes=0)), ()
        case (
            on.Rotate()
            | on.Thaw()
            | on.Release()
            | on.Recover()
            | on.Restart()
            | on.Arm()
            | on.Restore()
            | on.Witnessed()
        ):
            return _authority(s, event, off)
        case _:
            assert_never(event)


def _submit(s: State, event: on.Submit, off: Off) -> Step:
    if s.job is None:
        suspect = event.below_recovery and Guard.SUBMIT_SUSPECT not in off
        return replace(s, job=Job(event.meaning, epoch=s.authority.epoch, suspect=suspect)), (on.Told("new"),)
    if s.job.meaning == event.meaning:
        return s, (on.Told("same"),)
    if Guard.SUBMIT_MEANING not in off:
        _refuse("ZF010", "operation")
    return replace(s, job=replace(s.job, meaning=event.meaning)), (on.Told("same"),)


def _claim(s: State, event: on.Claim, off: Off) -> Step:
    _armed(s, off)
    job, nothing = s.job, (on.Told("nothing"),)
    if job is None or not (job.exec == "queued" or job.exec == "running" and job.expired):
        return s, nothing
    if (
        s.open_effects
        and Guard.CLAIM_OPEN not in off
        or job.epoch != s.authority.epoch
        and Guard.CLAIM_EPOCH not in off
    ):
        return s, nothing
    finish = s.job_class.policy == "strict" and s.applied_effects > 0
    if _due(s, job) == "poison" and Guard.CLAIM_BUDGET not in off or finish and Guard.CLAIM_FINISH in off:
        return s, nothing
    job = replace(
        _gone(job, "running"),
        mode="finish" if finish else "execute",
        attempts=job.attempts + (not finish),
        finishes=job.finishes + finish,
        attempt=event.attempt,
        owner=event.owner,
    )
    grant = Grant(job.generation, event.attempt, event.owner, job.epoch)
    return replace(s, job=job), (on.Granted(grant, job.mode),)


def _begin(s: State, event: on.Begin, off: Off) -> Step:
    job, effect = _fence(s, event.grant, off), s.effects[event.key]
    if Guard.BEGIN_STATE not in off:
        if effect.state in APPLIED:
            return s, (on.Receipt(event.key),)
        if effect.state in OPEN:
            _refuse("ZF030", "effect_key")
    if job.mode == "finish" and Guard.BEGIN_MODE not in off:
        _refuse("ZF032", "mode")
    if s.authority.frozen and Guard.BEGIN_FROZEN not in off:
        _refuse("ZF021", "tenant")
    others = any(e.state != "none" for key, e in enumerate(s.effects) if key != event.key)
    if s.job_class.policy == "strict" and others and Guard.BEGIN_ONE not in off:
        _refuse("ZF031", "effect_key")
    if job.suspect and effect.state == "none" and Guard.BEGIN_SUSPECT not in off:
        _refuse("ZF030", "suspect")
    begun = Effect(
        effect.kind,
        "pending",
        event.effect_attempt,
        event.grant.attempt,
        earlier=effect.earlier if effect.effect_attempt is None else (*effect.earlier, effect.effect_attempt),
        quiescent=False,
        contradicted=effect.contradicted,
        begins=effect.begins + 1,
        version=effect.version,
    )
    return _effect(s, event.key, begun), (on.Dispatch(event.key, event.effect_attempt),)


def _record(s: State, event: on.Record, off: Off) -> Step:
    """Late evidence is welcome, late authority is not: no lease is asked for."""
    _armed(s, off)
    key, effect = event.key, s.effects[event.key]
    if effect.state == "none":
        _refuse("ZF033", "effect_key")
    outcome = event.outcome
    if effect.effect_attempt != event.effect_attempt and Guard.RECORD_BOUND not in off:
        if outcome != "success" or event.effect_attempt not in effect.earlier:
            _refuse("ZF033", "effect_attempt")
        if effect.state in AGAIN and Guard.RECORD_EARLIER not in off:
            return _dispute(s, key, effect)
        s = _put(s, key, replace(effect, contradicted=True))
        return s, (on.Told("superseded"), on.Alert("receipt of an earlier begin"))
    if outcome == "success":
        if effect.state in APPLIED:
            return s, (on.Told(effect.state),)
        if effect.state in AGAIN and Guard.RECORD_DISPUTE not in off:
            return _dispute(s, key, effect)
        if effect.disputed:
            return s, (on.Told("unknown"),)
    elif effect.contradicted and Guard.RECORD_EVIDENCE not in off:
        outcome = "unknown"
    if effect.state not in OPEN or outcome == "unknown" and effect.state == "unknown":
        _refuse("ZF033", "effect_key")
    s = _effect(s, key, replace(effect, state=outcome, disputed=False))
    job = _job(s)
    if outcome == "unknown":
        if job.exec == "running" and job.attempt == effect.begun_by:
            s, _ = _leave(s, job, off)
    else:
        s = _settle(s, off)
    return s, (on.Told(outcome),)


def _dispute(s: State, key: int, effect: Effect) -> Step:
    """A receipt against the belief that nothing happened: unknown again, and the job stops until somebody has looked."""
    s = _effect(s, key, replace(effect, state="unknown", disputed=True, contradicted=True))
    job = _job(s)
    stays = job.exec in ("done", "cancelled")
    return replace(s, job=_gone(job, job.exec if stays else "blocked")), (on.Told("unknown"), on.Alert("contradicted"))


def _publish(s: State, event: on.Publish, off: Off) -> Step:
    job = _job(s)
    if event.checked and Guard.PUBLISH_ATOMIC in off:
        pass
    elif Guard.PUBLISH_FENCE in off:
        _armed(s, off)
        if job.exec != "running":
            _refuse("ZF020", "state")
    else:
        job = _fence(s, event.grant, off)
    if s.open_effects and Guard.PUBLISH_CLOSED not in off:
        _refuse("ZF030", "effect")
    return replace(s, job=replace(job, exec="done", attempt=None, owner=None, expired=False)), ()


def _cancel(s: State, off: Off) -> Step:
    _armed(s, off)
    job = _job(s)
    if job.exec in ("done", "cancelled"):
        return s, (on.Told("too_late" if job.exec == "done" else "already_cancelled"),)
    if Guard.CANCEL_KEEPS in off:
        s = replace(s, effects=tuple(Effect(e.kind) for e in s.effects))
    if Guard.CANCEL_REVOKES in off:
        return replace(s, job=replace(job, exec="cancelled")), (on.Told("cancelled"),)
    return replace(s, job=_gone(job, "cancelled")), (on.Told("cancelled"),)


def _reconcile(s: State, event: on.Reconcile, off: Off) -> Step:
    """An unknown effect is settled by evidence; for a suspect job also one of which the database knows nothing."""
    _armed(s, off)
    key, effect, job = event.key, s.effects[event.key], _job(s)
    created = effect.state == "none" and job.suspect
    if effect.state != "unknown" and not created:
        _refuse("ZF036", "state" if effect.state != "none" else "effect_key")
    if event.version not in (None, effect.version) and Guard.VERSION not in off:
        _refuse("ZF035", "version")
    over = effect.quiescent or event.attested or effect.kind == "keyed"
    if event.verdict == "not_applied" and not over and Guard.QUIESCENCE not in off:
        _refuse("ZF034", "quiescent_at")
    become: EffectState = "resolved_applied" if event.verdict == "applied" else "resolved_not_applied"
    s = _settle(_effect(s, key, replace(effect, state=become, disputed=False, escalated=False)), off)
    return s, (on.Told(become),)


def _authority(
    s: State,
    event: on.Rotate | on.Thaw | on.Release | on.Recover | on.Restart | on.Arm | on.Restore | on.Witnessed,
    off: Off,
) -> Step:
    a, w = s.authority, s.witness
    match event:
        case on.Witnessed(reachable):
            return replace(s, witness=replace(w, reachable=reachable)), ()
        case on.Restart():
            return replace(s, authority=replace(a, armed=False)), ()
        case on.Restore(copy):
            restored = replace(copy.authority, armed=Guard.RESTORE_DISARMS in off, tip=False)
            return replace(s, job=copy.job, effects=copy.effects, authority=restored), ()
        case on.Thaw():
            _armed(s, off)
            return replace(s, authority=replace(a, frozen=False)), ()
        case on.Release():
            _armed(s, off)
            job = _job(s)
            if s.open_effects and Guard.RELEASE_CLOSED not in off:
                _refuse("ZF030", "effect")
            if job.exec not in ("held", "queued", "waiting") or job.epoch == a.epoch and job.exec != "held":
                return s, (on.Told("nothing"),)
            become: Exec = _due(s, job) if job.exec == "held" else job.exec
            return replace(s, job=replace(job, exec=become, epoch=a.epoch)), ()
        case on.Arm() | on.Rotate() | on.Recover():
            if isinstance(event, on.Rotate):
                _armed(s, off)
            elif a.armed:
                return s, (on.Told("armed"),)
            if not w.reachable:
                _refuse("ZF002", "unreachable")
    match event:
        case on.Arm():
            if Guard.ARM_EQUALITY not in off and not (a.tip and a.epoch == w.epoch - w.intended):
                _refuse("ZF002", "behind")
            return _turned(s, off) if w.intended else (replace(s, authority=replace(a, armed=True)), ())
        case on.Rotate(commits):
            first = Guard.ROTATE_WITNESS not in off
            s = replace(s, witness=replace(w, epoch=w.epoch + first, intended=not commits))
            if not commits:
                armed = Guard.ROTATE_DISARMS in off
                return replace(s, authority=replace(a, armed=armed)), (on.Told("lost"),)
            return _turned(s, off)
        case on.Recover():
            return _recover(s, off)


def _turned(s: State, off: Off) -> Step:
    """The rotation in the database: frozen, running work taken away, queued work held by comparison."""
    epoch = s.authority.epoch + 1 if Guard.ROTATE_WITNESS in off else s.witness.epoch
    s = replace(s, authority=Authority(epoch, frozen=True), witness=replace(s.witness, intended=False))
    if s.job is None or s.job.exec != "running" or Guard.ROTATE_HOLDS in off:
        return s, ()
    left, _ = _leave(s, s.job, off)
    return replace(left, job=_gone(s.job, "blocked" if left.open_effects else "held")), ()


def _recover(s: State, off: Off) -> Step:
    """After a restore: a new epoch, and nothing that may have been begun meanwhile is taken for not begun."""
    counted = s.authority.epoch if Guard.RECOVER_WITNESS in off else s.witness.epoch
    witness = Witness(max(counted + 1, s.witness.epoch))
    s = replace(s, authority=Authority(counted + 1, frozen=True), witness=witness)
    doubtful = ("pending", "failed_before_dispatch", "resolved_not_applied")

    def recovered(e: Effect) -> Effect:
        if e.state in doubtful and (Guard.RECOVER_SUSPECTS not in off or e.state == "pending"):
            e = replace(e, state="unknown", version=e.version + 1)
        if Guard.RECOVER_FORGETS not in off:
            # Forgotten, not unheard of: a receipt of it is late evidence.
            earlier = e.earlier if e.effect_attempt is None else (*e.earlier, e.effect_attempt)
            e = replace(e, effect_attempt=None, earlier=earlier)
        return replace(e, quiescent=e.quiescent and Guard.RECOVER_QUIET in off)

    if s.job is None or s.job.exec != "done":
        s = replace(s, effects=tuple(recovered(e) for e in s.effects))
    if s.job is None or s.job.exec == "done":
        return s, ()
    become: Exec = "blocked" if s.open_effects else "held"
    if s.job.exec in ("cancelled", "poison"):
        become = s.job.exec
    return replace(s, job=replace(_gone(s.job, become), suspect=Guard.RECOVER_SUSPECTS not in off)), ()
