-- Settles an unknown effect by evidence: applied (with a receipt) or not_applied. "Not applied" is refused (ZF034)
-- before the call can no longer be under way, unless the worker's end is attested or the same provider key is used again.
-- The same decision again, word for word under its id, changes nothing and says the same.
-- For a suspect job also an effect of which this database knows nothing (version 0): a restore may have lost its begin. It
-- is made, of the kind given, for the class given where the operation has several.
-- Locks: gate, job, effect.
CREATE OR REPLACE FUNCTION fencepost.reconcile(
    p_tenant text, p_operation text, p_effect_key text, p_version integer, p_verdict text, p_evidence_kind text,
    p_evidence_ref text, p_receipt text, p_decision_id uuid, p_actor text, p_reason text,
    p_class text DEFAULT NULL, p_kind text DEFAULT 'opaque')
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
    v_effect fencepost.effect;
    v_decision fencepost.decision;
    v_class text;
    v_became text;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    IF p_verdict IS NULL OR p_verdict NOT IN ('applied', 'not_applied') THEN
        PERFORM fencepost._refuse('ZF003', 'verdict is neither applied nor not_applied', 'verdict', NULL);
    ELSIF p_evidence_kind IS NULL OR p_evidence_kind NOT IN ('receipt_lookup', 'provider_statement', 'termination_attested', 'operator') THEN
        PERFORM fencepost._refuse('ZF037', 'evidence_kind is not receipt_lookup, provider_statement, termination_attested or operator',
            'evidence_kind', NULL);
    ELSIF p_evidence_ref IS NULL OR btrim(p_evidence_ref) = '' THEN
        PERFORM fencepost._refuse('ZF037', 'evidence_ref is empty', 'evidence_ref', 'say where the evidence can be found');
    ELSIF length(p_evidence_ref) > 2000 THEN
        PERFORM fencepost._refuse('ZF003', 'evidence_ref is longer than 2000 characters', 'evidence_ref', 'refer to the evidence, do not quote it');
    ELSIF p_verdict = 'applied' AND (p_receipt IS NULL OR btrim(p_receipt) = '') THEN
        PERFORM fencepost._refuse('ZF037', 'applied needs the provider''s receipt', 'receipt', NULL);
    ELSIF length(p_receipt) > 2000 THEN
        PERFORM fencepost._refuse('ZF003', 'receipt is longer than 2000 characters', 'receipt', 'give the provider''s reference');
    ELSIF p_decision_id IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'decision_id is null', 'decision_id', 'make a new UUID for every decision');
    END IF;
    v_became := CASE p_verdict WHEN 'applied' THEN 'resolved_applied' ELSE 'resolved_not_applied' END;
    v_decision.decision_id := p_decision_id;
    v_decision.kind := 'reconcile';
    v_decision.actor := p_actor;
    v_decision.reason := p_reason;
    v_decision.tenant := p_tenant;
    v_decision.operation := p_operation;
    v_decision.subject := p_effect_key;
    v_decision.verdict := p_verdict;
    v_decision.version := p_version;
    v_decision.evidence_kind := p_evidence_kind;
    v_decision.evidence_ref := p_evidence_ref;
    v_decision.receipt := CASE p_verdict WHEN 'applied' THEN p_receipt END;

    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT e.class INTO v_class FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key;
    IF NOT FOUND THEN
        v_class := fencepost._doubt_effect(p_tenant, p_operation, p_class, p_effect_key, p_kind, p_version, p_verdict, p_evidence_kind);
    END IF;
    SELECT j.* INTO STRICT v_job FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = v_class FOR NO KEY UPDATE;
    SELECT e.* INTO STRICT v_effect FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key FOR UPDATE;
    IF fencepost._decided(v_decision) THEN
        RETURN v_became;
    ELSIF v_effect.state <> 'unknown' THEN
        PERFORM fencepost._refuse('ZF036', 'the effect is ' || v_effect.state || ', not unknown', 'state',
            'only an unknown effect is reconciled; a pending one becomes unknown at its deadline');
    ELSIF v_effect.version IS DISTINCT FROM p_version THEN
        PERFORM fencepost._refuse('ZF035', 'the effect changed since it was looked at', 'version', 'look again: fencepost effects show');
    ELSIF p_verdict = 'not_applied' AND v_effect.quiescent_at > clock_timestamp() AND p_evidence_kind <> 'termination_attested'
          AND v_effect.kind <> 'keyed' THEN
        PERFORM fencepost._refuse('ZF034', 'the call may still be under way', 'quiescent_at',
            'decide after ' || to_char(v_effect.quiescent_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC, or attest that the worker ended');
    END IF;
    UPDATE fencepost.effect AS e SET state = v_became, receipt = v_decision.receipt, decision_id = p_decision_id, reason = NULL,
        version = e.version + 1, changed_at = clock_timestamp()
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key;
    PERFORM fencepost._effect_event(p_tenant, p_operation, p_effect_key, 'unknown', p_reason);
    PERFORM fencepost._decide(v_decision);
    PERFORM fencepost._settle(v_job, CASE p_verdict WHEN 'applied' THEN 1 ELSE 0 END);
    RETURN v_became;
END $$;

-- Makes an unknown effect of a suspect job, so that it can be settled; the caller settles it in the same transaction. Returns
-- its class. Refused (ZF036) for any other job.
CREATE OR REPLACE FUNCTION fencepost._doubt_effect(
    p_tenant text, p_operation text, p_class text, p_effect_key text, p_kind text, p_version integer, p_verdict text, p_evidence_kind text)
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_job fencepost.job;
    v_class text;
BEGIN
    SELECT j.class INTO v_class FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = coalesce(p_class, j.class) AND j.suspect
      AND (p_class IS NOT NULL OR 1 = (SELECT count(*) FROM fencepost.job AS o
                                       WHERE o.tenant = p_tenant AND o.operation = p_operation AND o.suspect));
    IF FOUND THEN
        SELECT j.* INTO v_job FROM fencepost.job AS j
        WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = v_class FOR NO KEY UPDATE;
    END IF;
    IF v_job.suspect IS NOT TRUE THEN
        PERFORM fencepost._refuse('ZF036', 'there is no such effect', 'effect_key', 'check tenant, operation and effect key');
    ELSIF p_version IS DISTINCT FROM 0 THEN
        PERFORM fencepost._refuse('ZF035', 'nothing is known of this effect: its version is 0', 'version', 'look again: fencepost effects show');
    ELSIF p_kind IS NULL OR p_kind NOT IN ('keyed', 'lookup', 'opaque') THEN
        PERFORM fencepost._refuse('ZF003', 'kind is not keyed, lookup or opaque', 'kind', NULL);
    END IF;
    INSERT INTO fencepost.effect (tenant, operation, effect_key, class, kind, state, dispatch_deadline, quiescent_at, reason, version, begins)
    VALUES (p_tenant, p_operation, p_effect_key, v_class, p_kind, 'unknown', v_job.quiescent_at, v_job.quiescent_at, 'suspect', 0, 0);
    PERFORM fencepost._effect_event(p_tenant, p_operation, p_effect_key, NULL, 'suspect');
    UPDATE fencepost.job AS j SET open_effects = j.open_effects + 1
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = v_class AND j.exec <> 'done';
    RETURN v_class;
END $$;
