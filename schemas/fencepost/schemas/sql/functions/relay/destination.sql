-- Registers a destination, or confirms that it still has the routes it was registered with (else ZF041).
-- The first destination of an installation starts at the very first event, a later one at the newest tick or at a tick
-- that is given, as long as everything after that is retained (else ZF003);
-- the reserved destination `-` finds the types that no destination has a route for.
CREATE OR REPLACE FUNCTION fencepost.register_destination(
    p_destination text, p_kind text, p_routes jsonb, p_accept_routes boolean DEFAULT false,
    p_start_tick bigint DEFAULT NULL)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_digest bytea := sha256(convert_to(p_routes::text, 'UTF8'));
    v_stored fencepost.destination;
    v_name text;
    v_all boolean;
BEGIN
    PERFORM fencepost._enter();
    IF p_destination IS NULL OR p_destination !~ '^[a-z][a-z0-9_-]{0,40}$' THEN
        PERFORM fencepost._refuse('ZF003', 'destination is not a lower-case name of at most 41 characters', 'destination', NULL);
    ELSIF p_kind IS NULL OR p_kind NOT IN ('kafka', 'rabbitmq') THEN
        PERFORM fencepost._refuse('ZF003', 'kind is neither kafka nor rabbitmq', 'kind', NULL);
    ELSIF jsonb_typeof(p_routes) <> 'array' OR jsonb_array_length(p_routes) = 0 THEN
        PERFORM fencepost._refuse('ZF003', 'routes are empty', 'routes', 'give at least one route');
    END IF;
    LOCK TABLE fencepost.destination IN SHARE ROW EXCLUSIVE MODE;
    SELECT * INTO v_stored FROM fencepost.destination AS d WHERE d.destination = p_destination;
    IF FOUND THEN
        IF v_stored.routes_digest = v_digest AND v_stored.kind = p_kind THEN
            RETURN;
        ELSIF NOT p_accept_routes THEN
            PERFORM fencepost._refuse('ZF041', 'the destination was registered with other routes', 'routes',
                'start one relay with --accept-routes once every relay has the new settings');
        END IF;
        UPDATE fencepost.destination AS d SET kind = p_kind, routes = p_routes, routes_digest = v_digest
        WHERE d.destination = p_destination;
        INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
        VALUES (gen_random_uuid(), 'routes', session_user, 'accept routes', p_destination, encode(v_digest, 'hex'));
        RETURN;
    END IF;
    -- The very first event can be sent only as long as nothing was recycled since.
    v_all := NOT EXISTS (SELECT FROM fencepost.destination AS d WHERE d.destination <> '-')
             AND EXISTS (SELECT FROM fencepost.recycled AS r WHERE r.seq = 0)
             AND EXISTS (SELECT FROM fencepost.tick AS t WHERE t.n = 0);
    IF p_start_tick IS NOT NULL AND NOT EXISTS (
        SELECT FROM fencepost.tick AS t, fencepost.recycled AS r
        WHERE t.era = (SELECT i.era FROM fencepost.installation AS i) AND t.n = p_start_tick
          AND (t.era, t.n) >= (r.era, r.tick)) THEN
        PERFORM fencepost._refuse('ZF003', 'events after tick ' || p_start_tick || ' were recycled, or there is no such tick', 'start_tick',
            'start at the newest tick and send what is retained with: fencepost relay backfill');
    END IF;
    FOREACH v_name IN ARRAY CASE WHEN EXISTS (SELECT FROM fencepost.destination) THEN ARRAY[p_destination]
                                 ELSE ARRAY['-', p_destination] END LOOP
        INSERT INTO fencepost.destination (destination, kind, routes, routes_digest, start_era, start_tick)
        SELECT v_name, CASE v_name WHEN '-' THEN 'none' ELSE p_kind END,
               CASE v_name WHEN '-' THEN '[]' ELSE p_routes END,
               CASE v_name WHEN '-' THEN sha256('') ELSE v_digest END, t.era,
               CASE WHEN p_start_tick IS NOT NULL AND v_name <> '-' THEN p_start_tick
                    WHEN v_all THEN 0 ELSE t.n END
        FROM fencepost.tick AS t ORDER BY t.era DESC, t.n DESC LIMIT 1;
        INSERT INTO fencepost.slot (destination, slot)
        SELECT v_name, s FROM fencepost.installation AS i, generate_series(0, i.slots - 1) AS s;
    END LOOP;
END $$;
