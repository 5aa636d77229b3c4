-- Invariant: a batch is reserved before its handlers run, so a commit in between would turn events that nobody has handled
-- into duplicates. Refused at that commit, whoever issues it.
CREATE OR REPLACE FUNCTION fencepost._batch_is_settled()
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM fencepost.inbox_batch AS b WHERE b.transaction = NEW.transaction) THEN
        PERFORM fencepost._refuse('ZF004', 'the transaction would end before its batch is settled', 'batch',
            'the inbox commits; do not commit in a handler');
    END IF;
    RETURN NULL;
END $$;

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgrelid = 'fencepost.inbox_batch'::regclass AND t.tgname = 'inbox_batch_is_settled') THEN
        CREATE CONSTRAINT TRIGGER inbox_batch_is_settled AFTER INSERT ON fencepost.inbox_batch
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fencepost._batch_is_settled();
    END IF;
END $$;

-- Reserves many operations for a consumer in one statement; each array has one entry for each delivery, and no operation
-- and no coordinates come twice. outcome: reserved (handle it), duplicate (already handled with this meaning), alone
-- (nothing is recorded here: give it to reserve, in a transaction of its own, which says what it is). settle_batch has to
-- follow in the same transaction.
-- Locks: new reservations, reservations that were there, deliveries that have none, each in the order of their keys, so that
-- batches of the same wait for each other in turn. A copy waits, too, for whoever counts the reserved delivery again.
CREATE OR REPLACE FUNCTION fencepost.reserve_many(
    p_consumer text, p_tenants text[], p_operations text[], p_types text[], p_versions integer[], p_event_ids uuid[],
    p_sources text[], p_epochs bigint[], p_bindings text[], p_event_times timestamptz[], p_coordinates text[])
RETURNS TABLE (n bigint, outcome text, arrivals integer, other_epoch boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count constant integer := cardinality(p_coordinates);
    v_meanings bytea[];
    v_arrivals jsonb;
    v_reserved text[];
    v_horizon timestamptz;
    v_alone text[] := '{}';
    v_known record;
BEGIN
    PERFORM fencepost._require_identity('consumer', p_consumer);
    IF v_count IS NULL OR v_count NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'a batch has 1 to 1000 deliveries', 'coordinates', 'give a smaller batch');
    ELSIF (cardinality(p_tenants), cardinality(p_operations), cardinality(p_types), cardinality(p_versions), cardinality(p_event_ids))
          IS DISTINCT FROM (v_count, v_count, v_count, v_count, v_count)
       OR (cardinality(p_sources), cardinality(p_epochs), cardinality(p_bindings), cardinality(p_event_times))
          IS DISTINCT FROM (v_count, v_count, v_count, v_count) THEN
        PERFORM fencepost._refuse('ZF003', 'the arrays have different lengths', 'coordinates', 'give one entry for each delivery');
    ELSIF (SELECT count(DISTINCT c) FROM unnest(p_coordinates) AS c) <> v_count THEN
        PERFORM fencepost._refuse('ZF003', 'coordinates come twice in a batch', 'coordinates', 'reserve the second one alone');
    ELSIF (SELECT count(*) FROM (SELECT DISTINCT o.* FROM unnest(p_tenants, p_operations, p_types) AS o) AS d) <> v_count THEN
        PERFORM fencepost._refuse('ZF003', 'an operation comes twice in a batch', 'operation', 'reserve the second one alone');
    END IF;
    IF EXISTS (SELECT FROM unnest(p_tenants, p_operations, p_types, p_versions, p_event_ids, p_sources, p_epochs, p_bindings,
                                  p_event_times, p_coordinates) AS u (t, o, y, v, e, s, p, b, at, c)
               WHERE fencepost._is_plain_reservation(u.t, p_consumer, u.o, u.y, u.v, u.e, u.s, u.p, u.b, u.at, u.c) IS NOT TRUE) THEN
        PERFORM fencepost._require_identity('tenant', t) FROM (SELECT DISTINCT unnest(p_tenants)) AS u (t);
        PERFORM fencepost._require_identity('type', t) FROM (SELECT DISTINCT unnest(p_types)) AS u (t);
        PERFORM fencepost._require_identity('operation', o), fencepost._require_binding(b), fencepost._require_coordinates(c)
        FROM unnest(p_operations, p_bindings, p_coordinates) AS u (o, b, c);
        IF EXISTS (SELECT FROM unnest(p_versions) AS v WHERE v IS NULL OR v NOT BETWEEN 1 AND 32767) THEN
            PERFORM fencepost._refuse('ZF003', 'version is not between 1 and 32767', 'version', NULL);
        ELSIF array_position(p_event_ids, NULL) IS NOT NULL THEN
            PERFORM fencepost._refuse('ZF003', 'event_id is null', 'event_id', 'pass the id that the event arrived with');
        ELSIF EXISTS (SELECT FROM unnest(p_sources) AS s WHERE s IS NULL OR s = '' OR length(s) > 200) THEN
            PERFORM fencepost._refuse('ZF003', 'source is empty or longer than 200 characters', 'source', NULL);
        ELSIF EXISTS (SELECT FROM unnest(p_epochs) AS e WHERE e IS NULL OR e < 0) THEN
            PERFORM fencepost._refuse('ZF003', 'epoch is null or negative', 'epoch', 'pass the epoch that the event arrived with');
        ELSIF array_position(p_event_times, NULL) IS NOT NULL THEN
            PERFORM fencepost._refuse('ZF003', 'event_time is null', 'event_time', 'pass the time that the event arrived with');
        END IF;
    END IF;
    -- Others act upon this commit (a broker is acked, an operator is told): it must survive a crash.
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT array_agg(fencepost.meaning(t, o, y, v, b) ORDER BY u.n) INTO v_meanings
    FROM unnest(p_tenants, p_operations, p_types, p_versions, p_bindings) WITH ORDINALITY AS u (t, o, y, v, b, n);

    WITH taken AS (
        INSERT INTO fencepost.reservation AS r (tenant, consumer, operation, type, version, event_id, source, epoch, meaning, event_time, coordinates)
        SELECT u.t, p_consumer, u.o, u.y, u.v, u.e, u.s, u.p, u.m, u.at, u.c
        FROM unnest(p_tenants, p_operations, p_types, p_versions, p_event_ids, p_sources, p_epochs, v_meanings, p_event_times,
            p_coordinates) AS u (t, o, y, v, e, s, p, m, at, c)
        WHERE NOT EXISTS (SELECT FROM fencepost.unreserved_delivery AS d WHERE d.consumer = p_consumer AND d.coordinates = u.c)
        ORDER BY u.t, u.o, u.y
        ON CONFLICT DO NOTHING
        RETURNING r.coordinates)
    SELECT coalesce(array_agg(k.coordinates), '{}') INTO v_reserved FROM taken AS k;

    -- Invariant: as in reserve, the horizon is read by a statement after the insertion.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        INSERT INTO fencepost.unreserved_delivery (consumer, coordinates, tenant, operation, type, meaning, event_id, arrivals)
        SELECT p_consumer, u.c, u.t, u.o, u.y, u.m, u.e, 0
        FROM unnest(p_coordinates, p_tenants, p_operations, p_types, v_meanings, p_event_ids) AS u (c, t, o, y, m, e)
        ORDER BY u.c ON CONFLICT DO NOTHING;
        DELETE FROM fencepost.unreserved_delivery AS d
        WHERE d.consumer = p_consumer AND d.coordinates = ANY (p_coordinates) AND d.arrivals = 0;
        INSERT INTO fencepost.consumer (consumer) VALUES (p_consumer) ON CONFLICT DO NOTHING;
        INSERT INTO fencepost.installation SELECT i.* FROM fencepost.installation AS i
        WHERE 'urn:fencepost:' || i.id = ANY (p_sources) ON CONFLICT DO NOTHING;
    END IF;
    SELECT c.horizon INTO v_horizon FROM fencepost.consumer AS c WHERE c.consumer = p_consumer;

    -- Nearly every batch is new as a whole; the horizon of a type that is kept for ever is no younger.
    -- Invariant: so are the epochs and the deliveries without a reservation, for it may have waited across a rotation, or for
    -- one of these deliveries, which was refused then (see reserve).
    IF cardinality(v_reserved) = v_count
       AND NOT EXISTS (SELECT FROM fencepost.unreserved_delivery AS d WHERE d.consumer = p_consumer AND d.coordinates = ANY (p_coordinates))
       AND NOT EXISTS (SELECT FROM unnest(p_event_times) AS u (at) WHERE u.at < v_horizon)
       AND NOT EXISTS (SELECT FROM fencepost.installation AS i CROSS JOIN unnest(p_tenants, p_sources, p_epochs) AS u (t, s, p)
                       WHERE u.s = 'urn:fencepost:' || i.id AND u.p < i.epoch_counter
                         AND u.p < greatest(i.floor, (SELECT t.epoch FROM fencepost.tenant AS t WHERE t.tenant = u.t))) THEN
        INSERT INTO fencepost.inbox_batch (transaction, consumer, reserved, counted)
        VALUES (pg_current_xact_id(), p_consumer, v_reserved, '{}');
        RETURN QUERY SELECT u.n, 'reserved'::text, 1, false FROM generate_series(1, v_count::bigint) AS u (n);
        RETURN;
    END IF;

    -- The deliveries that their operations were reserved with.
    WITH known AS (
        SELECT r.tenant, r.operation, r.type
        FROM unnest(p_tenants, p_operations, p_types, v_meanings, p_coordinates) AS u (t, o, y, m, c)
        JOIN fencepost.reservation AS r
            ON r.tenant = u.t AND r.consumer = p_consumer AND r.operation = u.o AND r.type = u.y AND r.coordinates = u.c AND r.meaning = u.m
        WHERE u.c <> ALL (v_reserved)
        ORDER BY r.tenant, r.operation, r.type FOR UPDATE OF r),
    again AS (
        UPDATE fencepost.reservation AS r SET arrivals = r.arrivals + 1, last_at = clock_timestamp() FROM known AS k
        WHERE r.tenant = k.tenant AND r.consumer = p_consumer AND r.operation = k.operation AND r.type = k.type
        RETURNING r.coordinates, r.arrivals)
    SELECT coalesce(jsonb_object_agg(a.coordinates, a.arrivals), '{}') INTO v_arrivals FROM again AS a;

    -- Other deliveries of operations that were reserved, unless they came with something else before.
    WITH copied AS (
        INSERT INTO fencepost.unreserved_delivery AS d (consumer, coordinates, tenant, operation, type, meaning, event_id)
        SELECT p_consumer, u.c, u.t, u.o, u.y, u.m, u.e
        FROM unnest(p_tenants, p_operations, p_types, v_meanings, p_event_ids, p_coordinates) AS u (t, o, y, m, e, c)
        JOIN fencepost.reservation AS r
            ON r.tenant = u.t AND r.consumer = p_consumer AND r.operation = u.o AND r.type = u.y AND r.meaning = u.m
        WHERE u.c <> ALL (v_reserved) AND NOT v_arrivals ? u.c
          AND NOT EXISTS (SELECT FROM fencepost.reservation AS k WHERE k.consumer = p_consumer AND k.coordinates = u.c)
        ORDER BY u.c
        ON CONFLICT (consumer, coordinates) DO UPDATE SET arrivals = d.arrivals + 1, last_at = clock_timestamp()
        WHERE (d.tenant, d.operation, d.type, d.meaning) = (excluded.tenant, excluded.operation, excluded.type, excluded.meaning)
        RETURNING d.coordinates, d.arrivals)
    SELECT v_arrivals || coalesce(jsonb_object_agg(k.coordinates, k.arrivals), '{}') INTO v_arrivals FROM copied AS k;

    -- All else is not counted here: alone.
    FOR v_known IN
        SELECT u.n, u.c, u.p, u.c = ANY (v_reserved) AS taken, coalesce(u.at < coalesce(f.horizon, v_horizon), false)
            OR u.s = 'urn:fencepost:' || i.id AND u.p < fencepost._epoch(u.t)
            OR EXISTS (SELECT FROM fencepost.unreserved_delivery AS d WHERE d.consumer = p_consumer AND d.coordinates = u.c) AS old, r.epoch,
            r.tenant IS NULL AND NOT EXISTS (
                SELECT FROM fencepost.delivery AS d WHERE d.consumer = p_consumer AND d.coordinates = u.c) AS gone
        FROM fencepost.installation AS i
        CROSS JOIN unnest(p_coordinates, p_tenants, p_operations, p_types, p_sources, p_epochs, p_event_times)
             WITH ORDINALITY AS u (c, t, o, y, s, p, at, n)
        LEFT JOIN fencepost.reservation AS r
            ON r.tenant = u.t AND r.consumer = p_consumer AND r.operation = u.o AND r.type = u.y
        LEFT JOIN fencepost.consumer_forever AS f ON f.consumer = p_consumer AND f.type = u.y
        ORDER BY u.n
    LOOP
        n := v_known.n;
        arrivals := coalesce((v_arrivals ->> v_known.c)::integer, v_known.taken::integer);
        other_epoch := false;
        IF v_known.taken AND NOT v_known.old THEN
            outcome := 'reserved';
        ELSIF v_known.gone THEN
            RAISE serialization_failure USING MESSAGE = 'the operation was reserved after this snapshot', HINT = 'retry the transaction';
        ELSIF arrivals > 0 AND NOT v_known.taken THEN
            outcome := 'duplicate';
            other_epoch := coalesce(v_known.epoch <> v_known.p, false);
        ELSE
            outcome := 'alone';
            arrivals := 0;
            IF v_known.taken THEN
                v_alone := v_alone || v_known.c;
            END IF;
        END IF;
        RETURN NEXT;
    END LOOP;
    DELETE FROM fencepost.reservation AS r WHERE r.consumer = p_consumer AND r.coordinates = ANY (v_alone);
    INSERT INTO fencepost.inbox_batch (transaction, consumer, reserved, counted)
    VALUES (pg_current_xact_id(), p_consumer, ARRAY(SELECT unnest(v_reserved) EXCEPT SELECT unnest(v_alone)),
        ARRAY(SELECT jsonb_object_keys(v_arrivals)));
END $$;

-- Ends a batch: what is named was not handled and is as if it had not arrived; all else commits as handled. Only what this batch
-- has reserved or counted can be named: no reservation of anybody else's is ever taken back.
CREATE OR REPLACE FUNCTION fencepost.settle_batch(p_consumer text, p_unhandled text[])
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_batch fencepost.inbox_batch;
    v_counted text[];
BEGIN
    DELETE FROM fencepost.inbox_batch AS b
    WHERE b.transaction = pg_current_xact_id_if_assigned() AND b.consumer = p_consumer RETURNING b.* INTO v_batch;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF004', 'no batch of this consumer is open in this transaction', 'batch',
            'settle once, in the transaction that reserved');
    END IF;
    IF p_unhandled = '{}' THEN
        RETURN;
    ELSIF NOT p_unhandled <@ (v_batch.reserved || v_batch.counted)
          OR cardinality(p_unhandled) <> (SELECT count(DISTINCT c) FROM unnest(p_unhandled) AS c) THEN
        PERFORM fencepost._refuse('ZF003', 'a delivery did not arrive in this batch, or comes twice', 'coordinates',
            'give those that reserve_many answered in this transaction');
    END IF;
    DELETE FROM fencepost.reservation AS r
    WHERE r.consumer = p_consumer AND r.coordinates = ANY (p_unhandled) AND r.coordinates = ANY (v_batch.reserved);
    v_counted := ARRAY(SELECT unnest(p_unhandled) INTERSECT SELECT unnest(v_batch.counted));
    UPDATE fencepost.reservation AS r SET arrivals = r.arrivals - 1
    WHERE r.consumer = p_consumer AND r.coordinates = ANY (v_counted);
    UPDATE fencepost.unreserved_delivery AS d SET arrivals = d.arrivals - 1
    WHERE d.consumer = p_consumer AND d.coordinates = ANY (v_counted);
    DELETE FROM fencepost.unreserved_delivery AS d
    WHERE d.consumer = p_consumer AND d.coordinates = ANY (v_counted) AND d.arrivals = 0;
END $$;
