-- A pending effect whose worker is gone or whose deadline passed: nobody knows. The job row is locked by the caller.
CREATE OR REPLACE FUNCTION fencepost._forget(p_tenant text, p_operation text, p_effect_key text, p_reason text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fencepost.effect AS e SET state = 'unknown', reason = p_reason, version = e.version + 1, changed_at = clock_timestamp()
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key AND e.state = 'pending';
    IF FOUND THEN
        PERFORM fencepost._effect_event(p_tenant, p_operation, p_effect_key, 'pending', p_reason);
    END IF;
END $$;

-- Pending effects of jobs that no longer run turn unknown at their own deadline (a cancelled job's, for one).
CREATE OR REPLACE FUNCTION fencepost._expire_effects(p_classes text[], p_limit integer)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_key record;
    v_count integer := 0;
BEGIN
    FOR v_key IN
        WITH due AS MATERIALIZED (
            SELECT e.tenant, e.operation, e.class, e.effect_key FROM fencepost.effect AS e
            WHERE e.state = 'pending' AND e.class = ANY (p_classes) AND e.quiescent_at <= (SELECT clock_timestamp()))
        SELECT e.tenant, e.operation, e.effect_key
        FROM (SELECT d.* FROM due AS d ORDER BY d.tenant, d.operation, d.effect_key) AS e
        CROSS JOIN LATERAL (
            SELECT FROM fencepost.job AS j
            WHERE j.tenant = e.tenant AND j.operation = e.operation AND j.class = e.class AND j.exec <> 'running'
            FOR NO KEY UPDATE SKIP LOCKED) AS j
        LIMIT p_limit
    LOOP
        PERFORM fencepost._forget(v_key.tenant, v_key.operation, v_key.effect_key, 'deadline_passed');
        v_count := v_count + 1;
    END LOOP;
    RETURN v_count;
END $$;

-- Settles what an open effect was to its job: one less open, one more applied, and a blocked job runs again, or is poison
-- when its budget is used up.
CREATE OR REPLACE FUNCTION fencepost._settle(p_job fencepost.job, p_applied integer)
RETURNS void LANGUAGE sql AS $$
    UPDATE fencepost.job AS j SET
        open_effects = j.open_effects - CASE j.exec WHEN 'done' THEN 0 ELSE 1 END,
        applied_effects = j.applied_effects + p_applied,
        exec = CASE WHEN NOT d.unblocked THEN j.exec WHEN d.exhausted IS NULL THEN 'queued' ELSE 'poison' END,
        run_at = CASE WHEN d.unblocked THEN clock_timestamp() ELSE j.run_at END,
        reason = CASE WHEN d.unblocked THEN coalesce(d.exhausted, 'effect_settled') ELSE j.reason END,
        changed_at = clock_timestamp()
    FROM (
        SELECT p_job.exec = 'blocked' AND p_job.open_effects = 1 AS unblocked,
               CASE WHEN c.policy = 'strict' AND p_job.applied_effects + p_applied > 0
                    THEN CASE WHEN p_job.finishes >= c.max_finishes THEN 'finishes_exhausted' END
                    ELSE CASE WHEN p_job.attempts >= c.max_attempts THEN 'attempts_exhausted' END END AS exhausted
        FROM fencepost.job_class AS c WHERE c.class = p_job.class) AS d
    WHERE j.tenant = p_job.tenant AND j.operation = p_job.operation AND j.class = p_job.class
$$;

-- A receipt against the belief that nothing happened: unknown again, and the job stops until somebody has looked.
CREATE OR REPLACE FUNCTION fencepost._dispute(p_effect fencepost.effect, p_receipt text, p_result bytea)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fencepost.effect AS e SET contradicted = true, state = 'unknown', reason = 'contradicted', version = e.version + 1,
        receipt = p_receipt, result = p_result, decision_id = NULL, changed_at = clock_timestamp()
    WHERE e.tenant = p_effect.tenant AND e.operation = p_effect.operation AND e.effect_key = p_effect.effect_key;
    PERFORM fencepost._effect_event(p_effect.tenant, p_effect.operation, p_effect.effect_key, p_effect.state, 'contradicted');
    UPDATE fencepost.job AS j SET open_effects = CASE WHEN j.exec = 'done' THEN 0 ELSE j.open_effects + 1 END,
        exec = CASE WHEN j.exec IN ('done', 'cancelled') THEN j.exec ELSE 'blocked' END,
        generation = j.generation + 1, attempt = NULL, owner = NULL, lease_until = NULL,
        reason = 'effect_contradicted', changed_at = clock_timestamp()
    WHERE j.tenant = p_effect.tenant AND j.operation = p_effect.operation AND j.class = p_effect.class;
END $$;

-- Records what became of an effect. Needs the effect attempt, not the lease: late evidence is welcome, late authority is
-- not. Only success (with a receipt) and failed_before_dispatch are definite; unknown takes the job away from its attempt.
-- Returns the state of the effect, or superseded: the receipt of an earlier begin was kept as evidence, and only that.
-- Locks: gate, job, effect.
CREATE OR REPLACE FUNCTION fencepost.record_effect(
    p_tenant text, p_operation text, p_effect_key text, p_effect_attempt uuid, p_outcome text, p_receipt text,
    p_result bytea, p_reason text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
    v_effect fencepost.effect;
    v_class text;
    v_outcome text := p_outcome;
BEGIN
    IF p_outcome IS NULL OR p_outcome NOT IN ('success', 'failed_before_dispatch', 'unknown') THEN
        PERFORM fencepost._refuse('ZF003', 'outcome is not success, failed_before_dispatch or unknown', 'outcome', NULL);
    ELSIF p_outcome = 'success' AND (p_receipt IS NULL OR length(p_receipt) NOT BETWEEN 1 AND 2000) THEN
        PERFORM fencepost._refuse('ZF037', 'success needs the provider''s receipt', 'receipt', 'without one the effect is unknown');
    ELSIF octet_length(p_result) > 1048576 THEN
        PERFORM fencepost._refuse('ZF003', 'result is larger than 1 MiB', 'result', 'keep a reference');
    END IF;
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT e.class INTO v_class FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF033', 'no such effect was begun', 'effect_key', 'begin before the dispatch');
    END IF;
    SELECT j.* INTO STRICT v_job FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = v_class FOR NO KEY UPDATE;
    SELECT e.* INTO STRICT v_effect FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key FOR UPDATE;
    IF v_effect.effect_attempt IS DISTINCT FROM p_effect_attempt AND p_outcome = 'success' AND EXISTS (
        SELECT FROM fencepost.effect_event AS v
        WHERE v.tenant = p_tenant AND v.operation = p_operation AND v.effect_key = p_effect_key
          AND v.effect_attempt = p_effect_attempt) THEN
        -- A receipt of an earlier begin, after a later one: kept as evidence and flagged. It stops an effect that would be
        -- begun again; an open or applied one keeps its state.
        INSERT INTO fencepost.effect_event (tenant, operation, effect_key, effect_attempt, was, became, receipt, reason, version)
        VALUES (p_tenant, p_operation, p_effect_key, p_effect_attempt, v_effect.state, v_effect.state, p_receipt,
            'late_receipt_of_earlier_attempt', v_effect.version);
        IF v_effect.state IN ('failed_before_dispatch', 'resolved_not_applied') THEN
            PERFORM fencepost._dispute(v_effect, p_receipt, p_result);
            RETURN 'unknown';
        END IF;
        UPDATE fencepost.effect AS e SET contradicted = true
        WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key AND NOT e.contradicted;
        RETURN 'superseded';
    ELSIF v_effect.effect_attempt IS DISTINCT FROM p_effect_attempt THEN
        PERFORM fencepost._refuse('ZF033', 'the effect was begun again by another attempt', 'effect_attempt',
            'give the receipt to an operator: fencepost effects reconcile');
    END IF;

    -- Invariant: a receipt on record is never overruled by a worker that did not send.
    IF p_outcome = 'failed_before_dispatch' AND v_effect.contradicted THEN
        v_outcome := 'unknown';
    END IF;
    IF p_outcome = 'success' AND v_effect.state IN ('success', 'resolved_applied') THEN
        IF v_effect.receipt <> p_receipt THEN
            -- Late evidence is always kept; it agrees that the effect happened, so nothing else changes.
            INSERT INTO fencepost.effect_event (tenant, operation, effect_key, effect_attempt, was, became, receipt, reason, version)
            VALUES (p_tenant, p_operation, p_effect_key, p_effect_attempt, v_effect.state, v_effect.state, p_receipt,
                'another_receipt', v_effect.version);
        END IF;
        RETURN v_effect.state;
    ELSIF p_outcome = 'success' AND v_effect.state IN ('failed_before_dispatch', 'resolved_not_applied') THEN
        PERFORM fencepost._dispute(v_effect, p_receipt, p_result);
        RETURN 'unknown';
    ELSIF p_outcome = 'success' AND v_effect.reason = 'contradicted' THEN
        RETURN 'unknown';
    ELSIF v_effect.state NOT IN ('pending', 'unknown') OR v_outcome = 'unknown' AND v_effect.state = 'unknown' THEN
        PERFORM fencepost._refuse('ZF033', 'the effect is already ' || v_effect.state, 'effect_key', 'nothing is left to record');
    END IF;

    UPDATE fencepost.effect AS e SET state = v_outcome, receipt = CASE v_outcome WHEN 'success' THEN p_receipt ELSE e.receipt END,
        result = CASE v_outcome WHEN 'success' THEN p_result ELSE e.result END, reason = left(p_reason, 500),
        version = e.version + 1, changed_at = clock_timestamp()
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key;
    PERFORM fencepost._effect_event(p_tenant, p_operation, p_effect_key, v_effect.state, left(p_reason, 500));
    IF v_outcome = 'unknown' THEN
        IF v_job.exec = 'running' AND v_job.attempt = v_effect.begun_by THEN
            PERFORM fencepost._leave(v_job, 'effect_unknown', left(coalesce(p_reason, ''), 500), interval '0');
        END IF;
    ELSE
        PERFORM fencepost._settle(v_job, CASE v_outcome WHEN 'success' THEN 1 ELSE 0 END);
    END IF;
    RETURN v_outcome;
END $$;
