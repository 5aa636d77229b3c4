-- Invariant: an unknown effect has an assignee and a severity from its first moment, whatever made it unknown; a contradicted
-- one is critical at once. What is no longer unknown is nobody's.
CREATE OR REPLACE FUNCTION fencepost._hold_unknown()
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.state <> 'unknown' THEN
        NEW.unknown_since := NULL;
        NEW.escalations := 0;
        NEW.severity := 'normal';
        RETURN NEW;
    END IF;
    IF TG_OP = 'INSERT' OR OLD.state <> 'unknown' THEN
        NEW.unknown_since := clock_timestamp();
        NEW.escalations := 0;
        NEW.severity := 'normal';
        NEW.assignee := (SELECT c.assignee FROM fencepost.job_class AS c WHERE c.class = NEW.class);
    END IF;
    IF NEW.contradicted THEN
        NEW.severity := 'critical';
    END IF;
    RETURN NEW;
END $$;

-- Locks: none where the triggers exist (see append_only).
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'fencepost.effect'::regclass AND tgname = 'hold_unknown') THEN
        CREATE TRIGGER hold_unknown BEFORE UPDATE ON fencepost.effect FOR EACH ROW
            WHEN ((OLD.state = 'unknown') <> (NEW.state = 'unknown') OR OLD.contradicted <> NEW.contradicted)
            EXECUTE FUNCTION fencepost._hold_unknown();
        CREATE TRIGGER hold_unknown_new BEFORE INSERT ON fencepost.effect FOR EACH ROW
            WHEN (NEW.state = 'unknown') EXECUTE FUNCTION fencepost._hold_unknown();
    END IF;
END $$;

-- Says whose unknown effects of a class are, and how they escalate: after each interval at least that severity, and that
-- assignee (null: as before). The handler's process calls it beside register_class.
CREATE OR REPLACE FUNCTION fencepost.set_escalation(
    p_class text, p_assignee text, p_after interval[], p_severity text[], p_to text[])
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_step integer;
BEGIN
    PERFORM fencepost._require_identity('assignee', p_assignee);
    IF p_after IS NULL OR p_severity IS NULL OR p_to IS NULL OR cardinality(p_after) > 10
       OR cardinality(p_after) <> cardinality(p_severity) OR cardinality(p_after) <> cardinality(p_to) THEN
        PERFORM fencepost._refuse('ZF003', 'the escalation is not at most ten steps of interval, severity and assignee', 'escalate', NULL);
    END IF;
    FOR v_step IN 1 .. cardinality(p_after) LOOP
        IF p_after[v_step] IS NULL OR p_after[v_step] <= coalesce(p_after[v_step - 1], interval '0')
           OR p_after[v_step] > interval '3650 days' THEN
            PERFORM fencepost._refuse('ZF003', 'escalation intervals do not grow, or are longer than ten years', 'escalate', NULL);
        ELSIF p_severity[v_step] IS NULL OR p_severity[v_step] NOT IN ('normal', 'high', 'critical') THEN
            PERFORM fencepost._refuse('ZF003', 'severity is not normal, high or critical', 'severity', NULL);
        ELSIF p_to[v_step] IS NOT NULL THEN
            PERFORM fencepost._require_identity('assignee', p_to[v_step]);
        END IF;
    END LOOP;
    IF NOT EXISTS (SELECT FROM fencepost.job_class AS c WHERE c.class = p_class) THEN
        PERFORM fencepost._refuse('ZF051', 'the class is not registered', 'class', 'register it first');
    END IF;
    UPDATE fencepost.job_class AS c SET assignee = p_assignee, escalate_after = p_after, escalate_severity = p_severity, escalate_to = p_to
    WHERE c.class = p_class AND (c.assignee, c.escalate_after, c.escalate_severity, c.escalate_to)
        IS DISTINCT FROM (p_assignee, p_after, p_severity, p_to);
END $$;

CREATE OR REPLACE FUNCTION fencepost._more_severe(p_one text, p_other text)
RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT r.s FROM unnest(ARRAY['critical', 'high', 'normal']) WITH ORDINALITY AS r (s, n)
    WHERE r.s IN (p_one, p_other) ORDER BY r.n LIMIT 1
$$;

-- Takes every step that is due for unknown effects: severity only grows, the assignee may change, and nothing is resolved.
-- Returns how many effects were escalated. Locks: gate, then effects, skipping what others hold.
CREATE OR REPLACE FUNCTION fencepost.escalate_effects(p_limit integer)
RETURNS integer LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_due record;
    v_class fencepost.job_class;
    v_step integer;
    v_severity text;
    v_assignee text;
    v_count integer := 0;
BEGIN
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 10000 THEN
        PERFORM fencepost._refuse('ZF003', 'limit is not between 1 and 10000', 'limit', NULL);
    END IF;
    PERFORM fencepost._enter();
    FOR v_due IN
        SELECT e.* FROM fencepost.effect AS e JOIN fencepost.job_class AS c ON c.class = e.class
        WHERE e.state = 'unknown' AND e.unknown_since + c.escalate_after[e.escalations + 1] <= (SELECT clock_timestamp())
        ORDER BY e.unknown_since, e.tenant, e.operation, e.effect_key LIMIT p_limit FOR NO KEY UPDATE OF e SKIP LOCKED
    LOOP
        SELECT c.* INTO STRICT v_class FROM fencepost.job_class AS c WHERE c.class = v_due.class;
        v_step := v_due.escalations;
        v_severity := v_due.severity;
        v_assignee := v_due.assignee;
        -- Null behind the last step.
        WHILE v_due.unknown_since + v_class.escalate_after[v_step + 1] <= clock_timestamp() LOOP
            v_step := v_step + 1;
            v_severity := fencepost._more_severe(v_severity, v_class.escalate_severity[v_step]);
            v_assignee := coalesce(v_class.escalate_to[v_step], v_assignee);
        END LOOP;
        CONTINUE WHEN v_step = v_due.escalations;
        UPDATE fencepost.effect AS e SET severity = v_severity, assignee = v_assignee, escalations = v_step
        WHERE e.tenant = v_due.tenant AND e.operation = v_due.operation AND e.effect_key = v_due.effect_key;
        PERFORM fencepost._assigned_event(v_due.tenant, v_due.operation, v_due.effect_key, 'escalated');
        v_count := v_count + 1;
    END LOOP;
    RETURN v_count;
END $$;

-- Appends to an effect's history whose it is by now; its state and version stay.
CREATE OR REPLACE FUNCTION fencepost._assigned_event(p_tenant text, p_operation text, p_effect_key text, p_reason text)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO fencepost.effect_event (tenant, operation, effect_key, effect_attempt, was, became, reason, version, severity, assignee)
    SELECT e.tenant, e.operation, e.effect_key, e.effect_attempt, e.state, e.state, p_reason, e.version, e.severity, e.assignee
    FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key
$$;

-- Gives an unknown effect to somebody, and another severity where one is given; its state and version stay.
-- Locks: gate, effect.
CREATE OR REPLACE FUNCTION fencepost.assign_effect(
    p_tenant text, p_operation text, p_effect_key text, p_version integer, p_assignee text, p_severity text, p_decision_id uuid,
    p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_effect fencepost.effect;
    v_decision fencepost.decision;
BEGIN
    PERFORM fencepost._require_identity('assignee', p_assignee);
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    IF p_severity NOT IN ('normal', 'high', 'critical') THEN
        PERFORM fencepost._refuse('ZF003', 'severity is not normal, high or critical', 'severity', NULL);
    ELSIF p_decision_id IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'decision_id is null', 'decision_id', 'make a new UUID for every decision');
    END IF;
    v_decision.decision_id := p_decision_id;
    v_decision.kind := 'assign';
    v_decision.actor := p_actor;
    v_decision.reason := p_reason;
    v_decision.tenant := p_tenant;
    v_decision.operation := p_operation;
    v_decision.subject := p_effect_key;
    v_decision.verdict := concat_ws(', ', p_assignee, p_severity);
    v_decision.version := p_version;
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT e.* INTO v_effect FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF036', 'there is no such effect', 'effect_key', 'check tenant, operation and effect key');
    ELSIF fencepost._decided(v_decision) THEN
        RETURN;
    ELSIF v_effect.state <> 'unknown' THEN
        PERFORM fencepost._refuse('ZF036', 'the effect is ' || v_effect.state || ', not unknown', 'state', 'only an unknown effect is somebody''s');
    ELSIF v_effect.version IS DISTINCT FROM p_version THEN
        PERFORM fencepost._refuse('ZF035', 'the effect changed since it was looked at', 'version', 'look again: fencepost effects show');
    END IF;
    UPDATE fencepost.effect AS e SET assignee = p_assignee, severity = coalesce(p_severity, e.severity)
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key;
    PERFORM fencepost._assigned_event(p_tenant, p_operation, p_effect_key, 'assigned');
    PERFORM fencepost._decide(v_decision);
END $$;
