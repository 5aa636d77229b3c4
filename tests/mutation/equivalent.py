"""Mutants that no test can tell from the original, each with what implies the predicate that was removed."""

HELD = "the job's row is locked before, and whoever changes an effect's state, version or receipt locks that row first"
MEANT = "the meaning is a digest over tenant, operation, type, version and binding, and it is compared as well"

EQUIVALENT: dict[str, str] = {
    "claim: IF EXISTS (SELECT FROM fencepost.lifecycle) -> true": "saves a call: where no class was handed over it refuses none",
    "_finished: p_job.archived_at IS NULL -> true": "an archived job has neither attempts nor holds, and every walk begins with these",
    "claim: j.open_effects = 0 -> true": "_take and _take_turn compare it on the row that they lock, which stays as it is until the end",
    "claim: j.exec = 'queued' -> true": "as for open_effects; and whatever takes a job out of the queue advances its generation",
    "claim: IF v_turns <> '{}' -> true": "saves a statement: jsonb_each of an empty object has no rows, so nothing is noted",
    "claim: WHEN v_share = 0 -> false": "with nothing left to take every further step takes nothing: LIMIT 0, v_left <= 0",
    "_publication_guard: no FOR NO KEY UPDATE": (
        "fence() locks the job's row in the same (sub)transaction that inserts the row which fires this; they end together"
    ),
    "_leave: e.state = 'pending' -> true": "_forget compares it again; saves a call for each effect that is settled",
    "_take: a.due <= p_now -> true": "the job's run_at is compared as well, and decides; saves looking at jobs that are not due",
    "_take: k.exec = 'queued' -> true": "whatever takes a job out of the queue advances its generation, which is compared as well",
    "submit: IF NOT FOUND -> false": (
        "jobs are never deleted, and what an old snapshot does not see makes ON CONFLICT itself raise 40001"
    ),
    "_decided: row comparison without v_was.kind": (
        "a reconciliation always has an evidence_kind and an assignment never, and that is compared as well"
    ),
    "escalate_effects: WHEN v_step = v_due.escalations -> false": (
        "the query lets through only what has a step due; of use where a policy changes in between"
    ),
    "take_lookups: (l.due_at IS NULL OR l.due_at <= (SELECT clock_timestamp())) -> true": (
        "what is not due sorts behind all that is, and the WHERE of the upsert compares it again"
    ),
    "settle_lookup: no PERFORM fencepost._enter()": "reconcile enters as well, and nothing is written before it",
    "effect: trigger hold_unknown_new whatever WHEN says": "saves a call: to what is not unknown it gives the defaults of its columns",
    "escalate_effects: e.state = 'unknown' -> true": "CHECK: unknown_since is set exactly while the effect is unknown",
    "begin_effect: IF FOUND -> true": "without an effect every column of v_effect is null, and no branch is taken by null",
    "begin_effect: e.state IN ('failed_before_dispatch', 'resolved_not_applied') -> true": (
        "a row that appeared since it was looked at is another class's (this job's row is locked), which the next predicate refuses"
    ),
    "begin_effect: coalesce(e.request_digest, p_request_digest) = p_request_digest -> true": (
        "a row of this class was compared above, and cannot have changed since: " + HELD
    ),
    "complete_many: IF cardinality(v_done) = cardinality(p_tenants) -> false": "saves a statement: its WHERE leaves out what is done",
    "complete_many: j.exec = 'running' -> true": (
        "CHECK of job: an attempt is set exactly while it is running, and j.attempt = u.attempt is compared as well"
    ),
    "present_begin: v_effect.effect_attempt = p_effect_attempt -> false": (
        "whatever sets effect_attempt appends it to effect_event in the same transaction, which the other side of OR finds"
    ),
    "present_begin: no FOR UPDATE": HELD,
    "record_effect: v_job.exec = 'running' -> true": (
        "CHECK of job: an attempt is set exactly while it is running, and it is compared as well"
    ),
    "record_effect: NOT e.contradicted -> true": "saves an update: true is written over true",
    "record_effect: no FOR UPDATE": HELD,
    "reconcile: no FOR UPDATE": HELD,
    **{
        f"_judge_reservation: row comparison without {row}.{part}": MEANT
        for row in ("r", "v_delivery")
        for part in ("tenant", "operation", "type")
    },
    "settle_batch: b.transaction = pg_current_xact_id_if_assigned() -> true": (
        "no row of another transaction is ever seen: none is ever committed"
    ),
    "settle_batch: IF p_unhandled = '{}' -> false": "saves four statements, which would find nothing",
    "settle_batch: d.consumer = p_consumer -> true #2": "only what the statement before has counted down to 0 has no arrivals",
    "settle_batch: d.coordinates = ANY (v_counted) -> true #2": "as for the consumer: no other row has no arrivals",
}
