-- Leases unknown effects whose receipt may be looked up, each to one asker at a time: commit, then ask the provider.
-- Contradicted effects are left to people, and so are those whose begin nobody knows, after a restore, unless the provider
-- knows all begins under one key (keyed). quiescent_ms: how long a negative answer will still be refused, 0 when it counts.
-- Crash here: [L] between this commit and the answer: the lease ends, and somebody asks again.
-- Locks: gate, then look-ups in the order of their keys.
CREATE OR REPLACE FUNCTION fencepost.take_lookups(p_classes text[], p_taken_by uuid, p_limit integer, p_lease interval)
RETURNS TABLE (tenant text, operation text, effect_key text, class text, kind text, effect_attempt uuid, version integer,
               asks integer, begun_at timestamptz, quiescent_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF p_taken_by IS NULL OR p_classes IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'taken_by or classes is null', 'taken_by', 'make a new UUID for every question');
    ELSIF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'limit is not between 1 and 1000', 'limit', NULL);
    ELSIF p_lease IS NULL OR p_lease NOT BETWEEN interval '0.1 second' AND interval '1 hour' THEN
        PERFORM fencepost._refuse('ZF003', 'lease is not between 0.1 seconds and an hour', 'lease', NULL);
    END IF;
    PERFORM fencepost._enter();
    RETURN QUERY
    WITH due AS MATERIALIZED (
        SELECT e.tenant, e.operation, e.effect_key, e.version
        FROM fencepost.effect AS e
        LEFT JOIN fencepost.lookup AS l
          ON l.tenant = e.tenant AND l.operation = e.operation AND l.effect_key = e.effect_key
        WHERE e.state = 'unknown' AND e.kind IN ('lookup', 'keyed') AND NOT e.contradicted AND e.class = ANY (p_classes)
          AND (l.due_at IS NULL OR l.due_at <= (SELECT clock_timestamp()))
          -- Invariant: a provider is asked under the key of the only begin that there may have been, or under one that all had.
          AND (e.kind = 'keyed' OR e.effect_attempt IS NOT NULL AND NOT EXISTS (
               SELECT FROM fencepost.effect_event AS v
               WHERE v.tenant = e.tenant AND v.operation = e.operation AND v.effect_key = e.effect_key
                 AND v.reason = 'journalled_begin' AND v.effect_attempt <> e.effect_attempt))
        ORDER BY coalesce(l.due_at, e.unknown_since), e.tenant, e.operation, e.effect_key LIMIT p_limit
    ), taken AS (
        INSERT INTO fencepost.lookup AS l (tenant, operation, effect_key, version, taken_by, taken_at, due_at)
        SELECT d.tenant, d.operation, d.effect_key, d.version, p_taken_by, clock_timestamp(), clock_timestamp() + p_lease
        FROM due AS d ORDER BY d.tenant, d.operation, d.effect_key
        ON CONFLICT (tenant, operation, effect_key) DO UPDATE SET version = excluded.version, taken_by = excluded.taken_by,
            taken_at = excluded.taken_at, due_at = excluded.due_at,
            asks = CASE WHEN l.version = excluded.version THEN l.asks + 1 ELSE 1 END
        -- Invariant: somebody else may have taken it since it was looked at.
        WHERE l.due_at <= clock_timestamp()
        RETURNING l.*
    )
    SELECT e.tenant, e.operation, e.effect_key, e.class, e.kind, e.effect_attempt, e.version, t.asks, e.begun_at,
           greatest(0, ceil(extract(epoch FROM e.quiescent_at - t.taken_at) * 1000))::bigint
    FROM taken AS t
    JOIN fencepost.effect AS e ON e.tenant = t.tenant AND e.operation = t.operation AND e.effect_key = t.effect_key;
END $$;

-- Settles an effect by what its look-up said, through reconcile, as an operator would. A negative answer counts only when
-- the question was asked after the call could no longer be under way (ZF034): one asked before may have been overtaken.
-- Locks: gate, job, effect, look-up.
CREATE OR REPLACE FUNCTION fencepost.settle_lookup(
    p_tenant text, p_operation text, p_effect_key text, p_taken_by uuid, p_version integer, p_verdict text, p_evidence_ref text,
    p_receipt text, p_decision_id uuid, p_actor text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_taken_at timestamptz;
    v_quiescent_at timestamptz;
    v_became text;
BEGIN
    PERFORM fencepost._enter();
    SELECT l.taken_at, e.quiescent_at INTO v_taken_at, v_quiescent_at
    FROM fencepost.lookup AS l
    JOIN fencepost.effect AS e ON e.tenant = l.tenant AND e.operation = l.operation AND e.effect_key = l.effect_key
    WHERE l.tenant = p_tenant AND l.operation = p_operation AND l.effect_key = p_effect_key AND l.taken_by = p_taken_by;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF033', 'the look-up was taken over by another worker', 'taken_by', 'leave the answer to it');
    ELSIF p_verdict IS DISTINCT FROM 'applied' AND v_taken_at < v_quiescent_at THEN
        PERFORM fencepost._refuse('ZF034', 'the call may still have been under way when the provider was asked', 'quiescent_at', 'ask again later');
    END IF;
    v_became := fencepost.reconcile(p_tenant, p_operation, p_effect_key, p_version, p_verdict, 'receipt_lookup', p_evidence_ref,
        p_receipt, p_decision_id, p_actor, 'receipt looked up');
    UPDATE fencepost.lookup AS l SET answer = p_verdict, answered_at = clock_timestamp(), due_at = clock_timestamp()
    WHERE l.tenant = p_tenant AND l.operation = p_operation AND l.effect_key = p_effect_key AND l.taken_by = p_taken_by;
    RETURN v_became;
END $$;

-- An answer that settles nothing: asked again after the delay. False when another worker has taken the question over.
CREATE OR REPLACE FUNCTION fencepost.defer_lookup(
    p_tenant text, p_operation text, p_effect_key text, p_taken_by uuid, p_answer text, p_delay interval)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._require_identity('answer', p_answer);
    IF p_delay IS NULL OR p_delay NOT BETWEEN interval '0' AND interval '2 days' THEN
        PERFORM fencepost._refuse('ZF003', 'delay is not between 0 and two days', 'delay', NULL);
    END IF;
    UPDATE fencepost.lookup AS l SET answer = p_answer, answered_at = clock_timestamp(), due_at = clock_timestamp() + p_delay
    WHERE l.tenant = p_tenant AND l.operation = p_operation AND l.effect_key = p_effect_key AND l.taken_by = p_taken_by;
    RETURN FOUND;
END $$;
