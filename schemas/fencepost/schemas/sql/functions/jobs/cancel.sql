-- Takes authority away, not history: advances the generation, clears the lease, leaves effects as they are.
-- Returns cancelled, already_cancelled, or too_late (done).
-- Locks: gate, then the job row: a cancel and a completion are ordered, one of them wins and both say so.
CREATE OR REPLACE FUNCTION fencepost.cancel(p_tenant text, p_operation text, p_class text, p_actor text, p_reason text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_exec text;
    v_reason text;
    v_detail text;
    v_verdict text := 'cancelled';
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    -- Others act upon this commit (a broker is acked, an operator is told): it must survive a crash.
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT j.exec, j.reason, j.detail INTO v_exec, v_reason, v_detail FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF050', 'there is no such job', 'operation', 'check tenant, operation and class');
    ELSIF v_exec = 'done' THEN
        RETURN 'too_late';
    ELSIF v_exec = 'cancelled' AND v_reason = 'transferred' THEN
        PERFORM fencepost._refuse('ZF060', 'the job was taken over by ' || v_detail, 'operation', 'cancel it there, or let it be given back');
    ELSIF v_exec = 'cancelled' THEN
        RETURN 'already_cancelled';
    END IF;
    UPDATE fencepost.job AS j SET exec = 'cancelled', generation = j.generation + 1, attempt = NULL, owner = NULL,
        lease_until = NULL, reason = 'cancelled', detail = p_reason, changed_at = clock_timestamp()
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, tenant, operation, subject, verdict)
    VALUES (gen_random_uuid(), 'cancel', p_actor, p_reason, p_tenant, p_operation, p_class, v_verdict);
    RETURN v_verdict;
END $$;

-- Gives poison or cancelled work a fresh budget, on an operator's word; refused while an effect is open.
CREATE OR REPLACE FUNCTION fencepost.requeue(p_tenant text, p_operation text, p_class text, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    -- Others act upon this commit (a broker is acked, an operator is told): it must survive a crash.
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT j.* INTO v_job FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF050', 'there is no such job', 'operation', 'check tenant, operation and class');
    ELSIF v_job.exec NOT IN ('poison', 'cancelled') THEN
        PERFORM fencepost._refuse('ZF020', 'the job is neither poison nor cancelled', 'state', 'only those can be queued again');
    ELSIF v_job.exec = 'cancelled' AND v_job.reason = 'transferred' THEN
        PERFORM fencepost._refuse('ZF060', 'the job was taken over by ' || v_job.detail, 'operation', 'retry it there, or let it be given back');
    ELSIF v_job.archived_at IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF020', 'the job is archived', 'state', 'submit the work anew, as another operation');
    ELSIF v_job.open_effects > 0 THEN
        PERFORM fencepost._refuse('ZF030', 'an effect of this job is pending or unknown', 'effect', 'reconcile it first');
    END IF;
    UPDATE fencepost.job AS j SET exec = 'queued', generation = j.generation + 1, attempts = 0, finishes = 0,
        run_at = clock_timestamp(), reason = 'requeued', detail = p_reason, changed_at = clock_timestamp()
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
    DELETE FROM fencepost.wait AS w WHERE w.tenant = p_tenant AND w.operation = p_operation AND w.class = p_class;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, tenant, operation, subject, verdict)
    VALUES (gen_random_uuid(), 'requeue', p_actor, p_reason, p_tenant, p_operation, p_class, 'queued');
END $$;
