-- Registers a destination, or confirms that it still is as it was registered (else ZF041): kind, routes, and what a
-- refusal does to its key. The first destination of an installation starts at the very first event, and so do those that
-- are registered before anything was published; a later one starts at the newest tick. The reserved destination `-` finds
-- the types that no destination has a route for.
CREATE OR REPLACE FUNCTION fencepost.register_destination(
    p_destination text, p_kind text, p_routes jsonb, p_accept_routes boolean DEFAULT false, p_on_refusal text DEFAULT 'block')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_digest bytea := sha256(convert_to(p_routes::text, 'UTF8'));
    v_stored fencepost.destination;
    v_matches text[];
    v_first boolean;
    v_early boolean;
    v_name text;
BEGIN
    PERFORM fencepost._enter();
    IF p_destination IS NULL OR p_destination !~ '^[a-z][a-z0-9_-]{0,40}$' THEN
        PERFORM fencepost._refuse('ZF003', 'destination is not a lower-case name of at most 41 characters', 'destination', NULL);
    ELSIF p_kind IS NULL OR p_kind NOT IN ('kafka', 'rabbitmq') THEN
        PERFORM fencepost._refuse('ZF003', 'kind is neither kafka nor rabbitmq', 'kind', NULL);
    ELSIF p_on_refusal IS NULL OR p_on_refusal NOT IN ('block', 'pass') THEN
        PERFORM fencepost._refuse('ZF003', 'on_refusal is neither block nor pass', 'on_refusal', NULL);
    ELSIF jsonb_typeof(p_routes) IS DISTINCT FROM 'array' OR jsonb_array_length(p_routes) = 0 THEN
        PERFORM fencepost._refuse('ZF003', 'routes are empty', 'routes', 'give at least one route');
    END IF;
    SELECT array_agg(r ->> 'match') INTO v_matches FROM jsonb_array_elements(p_routes) AS r;
    IF array_position(v_matches, NULL) IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF003', 'a route has no match', 'routes', 'give a type, a prefix ending in .* or *');
    END IF;
    -- A relay that comes back with what is registered waits for nobody, and nobody for it.
    IF EXISTS (SELECT FROM fencepost.destination AS d
               WHERE d.destination = p_destination AND d.routes_digest = v_digest AND d.kind = p_kind
                 AND d.on_refusal = p_on_refusal) THEN
        RETURN;
    END IF;
    LOCK TABLE fencepost.destination IN SHARE ROW EXCLUSIVE MODE;
    SELECT * INTO v_stored FROM fencepost.destination AS d WHERE d.destination = p_destination;
    IF FOUND THEN
        IF v_stored.routes_digest = v_digest AND v_stored.kind = p_kind AND v_stored.on_refusal = p_on_refusal THEN
            RETURN;
        ELSIF NOT p_accept_routes THEN
            PERFORM fencepost._refuse('ZF041', 'the destination was registered with other routes',
                CASE WHEN v_stored.routes_digest = v_digest AND v_stored.kind = p_kind THEN 'on_refusal' ELSE 'routes' END,
                'start one relay with --accept-routes once every relay has the new settings');
        END IF;
        UPDATE fencepost.destination AS d
        SET kind = p_kind, routes = p_routes, routes_digest = v_digest, on_refusal = p_on_refusal
        WHERE d.destination = p_destination;
        PERFORM fencepost._span_routes(p_destination, v_matches, false);
        -- Where keys no longer wait, nothing is left to wait for.
        -- Locks: the slots, so that an ack of a relay with the old settings comes before this or knows of it.
        PERFORM FROM fencepost.slot AS s WHERE s.destination = p_destination ORDER BY s.slot FOR NO KEY UPDATE;
        UPDATE fencepost.parked AS k SET next_try_at = clock_timestamp()
        WHERE k.destination = p_destination AND k.reason = 'behind' AND p_on_refusal = 'pass';
        INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
        VALUES (gen_random_uuid(), 'routes', session_user, 'accept routes', p_destination, encode(v_digest, 'hex'));
        RETURN;
    END IF;
    LOCK TABLE fencepost.tick_gate IN EXCLUSIVE MODE;
    v_first := NOT EXISTS (SELECT FROM fencepost.destination);
    -- The very first event can be sent only as long as nothing was recycled since.
    v_early := (v_first OR NOT EXISTS (SELECT FROM fencepost.tick AS t WHERE t.era > 1 OR t.n > 0))
               AND EXISTS (SELECT FROM fencepost.recycled AS r WHERE r.seq = 0)
               AND EXISTS (SELECT FROM fencepost.tick AS t WHERE t.n = 0);
    FOREACH v_name IN ARRAY CASE WHEN v_first THEN ARRAY['-', p_destination] ELSE ARRAY[p_destination] END LOOP
        INSERT INTO fencepost.destination (destination, kind, routes, routes_digest, on_refusal, start_era, start_tick)
        SELECT v_name, CASE v_name WHEN '-' THEN 'none' ELSE p_kind END,
               CASE v_name WHEN '-' THEN '[]' ELSE p_routes END,
               CASE v_name WHEN '-' THEN sha256('') ELSE v_digest END,
               CASE v_name WHEN '-' THEN 'block' ELSE p_on_refusal END, t.era,
               CASE WHEN v_early THEN 0 ELSE t.n END
        FROM fencepost.tick AS t ORDER BY t.era DESC, t.n DESC LIMIT 1;
        INSERT INTO fencepost.slot (destination, slot)
        SELECT v_name, s FROM fencepost.installation AS i, generate_series(0, i.slots - 1) AS s;
    END LOOP;
    PERFORM fencepost._span_routes(p_destination, v_matches, v_early);
END $$;

-- Takes a destination away with its progress, on an operator's word. Refused while a relay serves it, and while it has
-- unsent or parked events, unless losing them is said aloud. What nobody has looked at yet becomes `-`'s business.
CREATE OR REPLACE FUNCTION fencepost.remove_destination(
    p_destination text, p_actor text, p_reason text, p_lose boolean DEFAULT false, OUT unsent bigint, OUT parked bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_most CONSTANT bigint := 1000000;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    LOCK TABLE fencepost.destination IN SHARE ROW EXCLUSIVE MODE;
    LOCK TABLE fencepost.tick_gate IN EXCLUSIVE MODE;
    PERFORM FROM fencepost.destination AS d WHERE d.destination = p_destination AND d.destination <> '-' FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such destination', 'destination', 'see: fencepost relay destinations');
    ELSIF EXISTS (SELECT FROM fencepost.relay AS r WHERE r.destination = p_destination AND r.lease_until > clock_timestamp()) THEN
        PERFORM fencepost._refuse('ZF003', 'a relay serves this destination', 'destination',
            'take it out of the settings of every relay, stop those relays, then remove it');
    END IF;
    unsent := fencepost._unsent(p_destination, v_most);
    SELECT count(*) INTO parked FROM fencepost.parked AS k WHERE k.destination = p_destination;
    IF unsent + parked > 0 AND p_lose IS NOT TRUE THEN
        PERFORM fencepost._refuse('ZF003', unsent || ' events are unsent and ' || parked || ' are parked', 'lose',
            'let a relay finish first, or lose them: --yes-lose');
    END IF;
    DELETE FROM fencepost.parked AS k WHERE k.destination = p_destination;
    DELETE FROM fencepost.overtaken AS g WHERE g.destination = p_destination;
    DELETE FROM fencepost.ack AS k WHERE k.destination = p_destination;
    DELETE FROM fencepost.relay AS r WHERE r.destination = p_destination;
    DELETE FROM fencepost.slot AS s WHERE s.destination = p_destination;
    DELETE FROM fencepost.route AS r WHERE r.destination = p_destination;
    DELETE FROM fencepost.destination AS d WHERE d.destination = p_destination;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict, evidence_ref)
    VALUES (gen_random_uuid(), 'remove_destination', p_actor, p_reason, p_destination, 'removed',
            'unsent ' || unsent || ', parked ' || parked);
END $$;
