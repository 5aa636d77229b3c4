-- Presents a begin that a runner's journal holds and that it does not know to have failed: what may have been dispatched
-- is never taken for never begun. Returns
--   known       this begin is in the effect's history: its own transitions settle it
--   unknown     it was not, and the effect is unknown from here on: its job waits for evidence
--   superseded  another begin of the effect is unknown or applied: kept as evidence, no state changes by it
--   pending     another begin of the effect is under way: nothing is kept, present it again later
--   no_job      there is no such job: this database has lost it, or is another one
-- Takes authority away and gives none: needs the gate and an armed database, no fence.
-- Crash here: [K5] after this commit and before the journal notes it: the next presentation finds it known.
-- Locks: gate, job, effect; a begin that may still commit holds the job, so it is waited for (five seconds, 55P03).
CREATE OR REPLACE FUNCTION fencepost.present_begin(
    p_tenant text, p_operation text, p_class text, p_effect_key text, p_kind text, p_effect_attempt uuid, p_attempt uuid,
    p_request_digest bytea)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_job fencepost.job;
    v_effect fencepost.effect;
    v_class text := p_class;
    v_quiescent timestamptz;
BEGIN
    PERFORM fencepost._require_identity('effect_key', p_effect_key);
    IF p_effect_attempt IS NULL OR p_attempt IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'effect_attempt or attempt is null', 'effect_attempt', NULL);
    ELSIF p_request_digest IS NULL OR octet_length(p_request_digest) <> 32 THEN
        PERFORM fencepost._refuse('ZF003', 'request_digest is not 32 bytes', 'request_digest', 'sha256 of the request');
    ELSIF p_kind IS NULL OR p_kind NOT IN ('keyed', 'lookup', 'opaque') THEN
        PERFORM fencepost._refuse('ZF003', 'kind is not keyed, lookup or opaque', 'kind', NULL);
    END IF;
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    -- The effect's own class, where a job of another class has begun this key.
    SELECT e.class INTO v_class FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key;
    v_class := coalesce(v_class, p_class);
    SELECT j.* INTO v_job FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = v_class FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN 'no_job';
    END IF;
    SELECT e.* INTO v_effect FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key FOR UPDATE;
    IF v_effect.effect_attempt = p_effect_attempt OR EXISTS (
        SELECT FROM fencepost.effect_event AS v
        WHERE v.tenant = p_tenant AND v.operation = p_operation AND v.effect_key = p_effect_key
          AND v.effect_attempt = p_effect_attempt) THEN
        RETURN 'known';
    ELSIF v_effect.state = 'pending' THEN
        RETURN 'pending';
    ELSIF v_effect.state IN ('unknown', 'success', 'resolved_applied') THEN
        INSERT INTO fencepost.effect_event (tenant, operation, effect_key, effect_attempt, was, became, reason, version)
        VALUES (p_tenant, p_operation, p_effect_key, p_effect_attempt, v_effect.state, v_effect.state, 'journalled_begin',
            v_effect.version);
        RETURN 'superseded';
    END IF;

    v_quiescent := clock_timestamp() + coalesce(
        (SELECT c.network_bound FROM fencepost.job_class AS c WHERE c.class = v_class), interval '30 s');
    IF v_effect.state IS NULL THEN
        INSERT INTO fencepost.effect (tenant, operation, effect_key, class, kind, state, effect_attempt, begun_by, request_digest,
            dispatch_deadline, quiescent_at, reason)
        VALUES (p_tenant, p_operation, p_effect_key, v_class, p_kind, 'unknown', p_effect_attempt, p_attempt, p_request_digest,
            clock_timestamp(), v_quiescent, 'journalled_begin');
    ELSE
        -- "Failed before dispatch" and "not applied" were said of other begins.
        UPDATE fencepost.effect AS e SET state = 'unknown', effect_attempt = p_effect_attempt, begun_by = p_attempt,
            quiescent_at = greatest(e.quiescent_at, v_quiescent), decision_id = NULL, reason = 'journalled_begin',
            version = e.version + 1, begins = e.begins + 1, changed_at = clock_timestamp()
        WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key;
    END IF;
    PERFORM fencepost._effect_event(p_tenant, p_operation, p_effect_key, v_effect.state, 'journalled_begin');
    UPDATE fencepost.job AS j SET open_effects = CASE j.exec WHEN 'done' THEN 0 ELSE j.open_effects + 1 END
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = v_class
    RETURNING j.* INTO v_job;
    IF v_job.exec = 'running' THEN
        PERFORM fencepost._leave(v_job, 'effect_unknown', 'journalled_begin', interval '0');
    ELSIF v_job.exec NOT IN ('done', 'cancelled', 'blocked') THEN
        UPDATE fencepost.job AS j SET exec = 'blocked', generation = j.generation + 1, reason = 'effect_unknown',
            detail = 'journalled_begin', changed_at = clock_timestamp()
        WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = v_class;
    END IF;
    RETURN 'unknown';
END $$;

-- Which of these begins the database has no trace of; the arrays are read side by side.
CREATE OR REPLACE FUNCTION fencepost.missing_begins(
    p_tenants text[], p_operations text[], p_effect_keys text[], p_effect_attempts uuid[])
RETURNS SETOF uuid LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT b.effect_attempt
    FROM unnest(p_tenants, p_operations, p_effect_keys, p_effect_attempts) AS b (tenant, operation, effect_key, effect_attempt)
    WHERE NOT EXISTS (SELECT FROM fencepost.effect AS e
                      WHERE e.tenant = b.tenant AND e.operation = b.operation AND e.effect_key = b.effect_key
                        AND e.effect_attempt = b.effect_attempt)
      AND NOT EXISTS (SELECT FROM fencepost.effect_event AS v
                      WHERE v.tenant = b.tenant AND v.operation = b.operation AND v.effect_key = b.effect_key
                        AND v.effect_attempt = b.effect_attempt)
$$;
