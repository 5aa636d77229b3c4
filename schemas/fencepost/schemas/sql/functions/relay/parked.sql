-- Operators' acts on parked events. None of them publishes: the slot's owner does, in the order of the key.
-- Locks: the slots concerned, by destination, so that acts and acks of a slot come one after the other.

-- Marks a parked event due. One without a route moves to every destination that has one now and does not answer for it
-- anyway, to its place in the order of its key there; refused while there is none. Returns due, or moved with the destinations.
CREATE OR REPLACE FUNCTION fencepost.retry_parked(
    p_destination text, p_seq bigint, p_actor text, p_reason text, OUT verdict text, OUT destinations text[])
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_parked fencepost.parked;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    SELECT k.* INTO v_parked FROM fencepost.parked AS k WHERE k.destination = p_destination AND k.seq = p_seq;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such parked event', 'seq', 'see: fencepost parked list');
    END IF;
    destinations := ARRAY[p_destination];
    verdict := 'due';
    IF v_parked.reason = 'no_route' THEN
        SELECT coalesce(array_agg(f.destination ORDER BY f.destination), '{}') INTO destinations FROM (
            SELECT d.destination FROM fencepost.destination AS d
            WHERE EXISTS (SELECT FROM fencepost.route AS r
                          WHERE r.destination = d.destination AND r.until IS NULL
                            AND fencepost._matches(r.match, v_parked.type))
              AND (d.destination = p_destination
                   -- One that answers for the event publishes or parks it by itself.
                   OR NOT EXISTS (SELECT FROM fencepost.route AS r
                                  WHERE r.destination = d.destination AND fencepost._matches(r.match, v_parked.type)
                                    AND p_seq > r.since AND (r.until IS NULL OR p_seq <= r.until)))
            FOR KEY SHARE OF d) AS f;
        IF destinations = '{}' THEN
            PERFORM fencepost._refuse('ZF003', 'no destination has a route for ' || v_parked.type, 'type',
                'add a route, start a relay with --accept-routes, then retry; or skip it: where it had a route, it is sent anyway');
        ELSIF p_destination = ANY (destinations) THEN
            destinations := ARRAY[p_destination];
        ELSE
            verdict := 'moved';
        END IF;
    END IF;
    PERFORM FROM fencepost.slot AS s
    WHERE s.slot = v_parked.slot AND (s.destination = p_destination OR s.destination = ANY (destinations))
    ORDER BY s.destination FOR NO KEY UPDATE;
    UPDATE fencepost.slot AS s SET acts = s.acts + 1
    WHERE s.slot = v_parked.slot AND (s.destination = p_destination OR s.destination = ANY (destinations));
    SELECT k.* INTO v_parked FROM fencepost.parked AS k WHERE k.destination = p_destination AND k.seq = p_seq;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'the event is no longer parked', 'seq', 'it was published, moved or skipped meanwhile');
    END IF;
    IF verdict = 'moved' THEN
        DELETE FROM fencepost.parked AS k WHERE k.destination = p_destination AND k.seq = p_seq;
        INSERT INTO fencepost.parked AS k (destination, slot, tenant, ordering_key, seq, event_id, operation, type, version, epoch,
            digest, recorded_at, content_type, attributes, reference, payload, reason, detail, attempts, next_try_at, parked_at)
        SELECT t.destination, v_parked.slot, v_parked.tenant, v_parked.ordering_key, v_parked.seq, v_parked.event_id,
               v_parked.operation, v_parked.type, v_parked.version, v_parked.epoch, v_parked.digest, v_parked.recorded_at,
               v_parked.content_type, v_parked.attributes, v_parked.reference, v_parked.payload, v_parked.reason,
               v_parked.detail, v_parked.attempts, clock_timestamp(), v_parked.parked_at
        FROM unnest(destinations) AS t (destination)
        ON CONFLICT (destination, seq) DO UPDATE SET next_try_at = clock_timestamp();
        PERFORM fencepost._wake_key(v_parked);
    ELSE
        UPDATE fencepost.parked AS k SET next_try_at = clock_timestamp()
        WHERE k.destination = p_destination AND k.seq = p_seq;
    END IF;
    PERFORM fencepost._decide_parked('retry_parked', v_parked, p_actor, p_reason,
        CASE verdict WHEN 'moved' THEN 'moved to ' || array_to_string(destinations, ', ') ELSE verdict END);
END $$;

-- Gives a parked event up, on an operator's word: it is never published here. The next one of its key becomes due, and the
-- key flows again with its last one.
CREATE OR REPLACE FUNCTION fencepost.skip_parked(p_destination text, p_seq bigint, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_parked fencepost.parked;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    UPDATE fencepost.slot AS s SET acts = s.acts + 1
    WHERE s.destination = p_destination
      AND s.slot = (SELECT k.slot FROM fencepost.parked AS k WHERE k.destination = p_destination AND k.seq = p_seq);
    DELETE FROM fencepost.parked AS k WHERE k.destination = p_destination AND k.seq = p_seq RETURNING k.* INTO v_parked;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such parked event', 'seq', 'see: fencepost parked list');
    END IF;
    PERFORM fencepost._wake_key(v_parked);
    PERFORM fencepost._decide_parked('skip_parked', v_parked, p_actor, p_reason, 'skipped');
END $$;

-- What now comes first of a key may be tried.
CREATE OR REPLACE FUNCTION fencepost._wake_key(p_parked fencepost.parked)
RETURNS void LANGUAGE sql AS $$
    UPDATE fencepost.parked AS k SET next_try_at = clock_timestamp()
    WHERE k.destination = p_parked.destination AND k.destination <> '-' AND k.slot = p_parked.slot
      AND k.tenant = p_parked.tenant AND k.ordering_key = p_parked.ordering_key
      AND k.seq = (SELECT min(f.seq) FROM fencepost.parked AS f
                   WHERE f.destination = p_parked.destination AND f.slot = p_parked.slot AND f.tenant = p_parked.tenant
                     AND f.ordering_key = p_parked.ordering_key)
$$;

CREATE OR REPLACE FUNCTION fencepost._decide_parked(
    p_kind text, p_parked fencepost.parked, p_actor text, p_reason text, p_verdict text)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, tenant, operation, subject, verdict, evidence_ref)
    VALUES (gen_random_uuid(), p_kind, p_actor, p_reason, p_parked.tenant, p_parked.operation, p_parked.event_id::text, p_verdict,
            format('%s/%s %s.v%s %s', p_parked.destination, p_parked.seq, p_parked.type, p_parked.version, p_parked.reason))
$$;
