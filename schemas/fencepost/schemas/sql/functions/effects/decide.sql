-- True when this very decision was taken before: the caller has nothing left to do. Another decision under its id is refused.
CREATE OR REPLACE FUNCTION fencepost._decided(p_decision fencepost.decision)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_was fencepost.decision;
BEGIN
    SELECT d.* INTO v_was FROM fencepost.decision AS d WHERE d.decision_id = p_decision.decision_id;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF (v_was.kind, v_was.actor, v_was.reason, v_was.tenant, v_was.operation, v_was.subject, v_was.verdict, v_was.version,
           v_was.evidence_kind, v_was.evidence_ref, v_was.receipt)
       IS DISTINCT FROM
          (p_decision.kind, p_decision.actor, p_decision.reason, p_decision.tenant, p_decision.operation, p_decision.subject,
           p_decision.verdict, p_decision.version, p_decision.evidence_kind, p_decision.evidence_ref, p_decision.receipt) THEN
        PERFORM fencepost._refuse('ZF010', 'another decision was taken under this id', 'decision_id',
            'make a new UUID for every decision; repeat one only word for word');
    END IF;
    RETURN true;
END $$;

-- Appends a decision to the log; refuses an id that another decision takes at this moment.
CREATE OR REPLACE FUNCTION fencepost._decide(p_decision fencepost.decision)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, tenant, operation, subject, verdict, version, evidence_kind,
        evidence_ref, receipt)
    VALUES (p_decision.decision_id, p_decision.kind, p_decision.actor, p_decision.reason, p_decision.tenant, p_decision.operation,
        p_decision.subject, p_decision.verdict, p_decision.version, p_decision.evidence_kind, p_decision.evidence_ref,
        p_decision.receipt)
    ON CONFLICT (decision_id) DO NOTHING;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF010', 'another decision was taken under this id', 'decision_id', 'make a new UUID for every decision');
    END IF;
END $$;
