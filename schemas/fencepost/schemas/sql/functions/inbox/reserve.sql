-- Reserves an operation for a consumer inside the handler's transaction: committed with its changes or not at all.
-- outcome: reserved (handle it), duplicate (already handled with this meaning), conflict (kept as a dead letter with
-- both meanings, not handled), before_horizon (nothing is known of it and it is older than what is remembered: kept as a
-- dead letter, not handled). Concurrent copies wait for the first transaction; bound it with lock_timeout.
CREATE OR REPLACE FUNCTION fencepost.reserve(
    p_tenant text, p_consumer text, p_operation text, p_type text, p_version integer, p_event_id uuid, p_source text,
    p_epoch bigint, p_binding text, p_event_time timestamptz, p_coordinates text, p_headers jsonb, p_payload bytea,
    OUT outcome text, OUT arrivals integer, OUT other_epoch boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_meaning bytea;
    v_delivery record;
    v_reserved record;
    v_horizon timestamptz;
BEGIN
    PERFORM fencepost._require_identity('tenant', p_tenant);
    PERFORM fencepost._require_identity('consumer', p_consumer);
    PERFORM fencepost._require_identity('operation', p_operation);
    PERFORM fencepost._require_identity('type', p_type);
    PERFORM fencepost._require_binding(p_binding);
    PERFORM fencepost._require_coordinates(p_coordinates);
    IF p_version IS NULL OR p_version NOT BETWEEN 1 AND 32767 THEN
        PERFORM fencepost._refuse('ZF003', 'version is not between 1 and 32767', 'version', NULL);
    ELSIF p_event_id IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'event_id is null', 'event_id', 'pass the id that the event arrived with');
    ELSIF p_source IS NULL OR p_source = '' OR length(p_source) > 200 THEN
        PERFORM fencepost._refuse('ZF003', 'source is empty or longer than 200 characters', 'source', NULL);
    ELSIF p_epoch IS NULL OR p_epoch < 0 THEN
        PERFORM fencepost._refuse('ZF003', 'epoch is null or negative', 'epoch', 'pass the epoch that the event arrived with');
    ELSIF p_event_time IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'event_time is null', 'event_time', 'pass the time that the event arrived with');
    ELSIF p_headers IS NULL OR p_payload IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'headers or payload are null', 'payload', 'a conflict must be able to keep them');
    END IF;
    -- Others act upon this commit (a broker is acked, an operator is told): it must survive a crash.
    PERFORM set_config('synchronous_commit', 'on', true);
    v_meaning := fencepost.meaning(p_tenant, p_operation, p_type, p_version, p_binding);
    other_epoch := false;

    INSERT INTO fencepost.delivery AS d (consumer, coordinates, tenant, operation, type, meaning, event_id)
    VALUES (p_consumer, p_coordinates, p_tenant, p_operation, p_type, v_meaning, p_event_id)
    ON CONFLICT (consumer, coordinates) DO UPDATE SET arrivals = d.arrivals + 1, last_at = clock_timestamp()
    RETURNING d.* INTO v_delivery;
    arrivals := v_delivery.arrivals;
    IF (v_delivery.tenant, v_delivery.operation, v_delivery.type, v_delivery.meaning)
       IS DISTINCT FROM (p_tenant, p_operation, p_type, v_meaning) THEN
        outcome := 'conflict';
        PERFORM fencepost._dead_letter(p_consumer, p_coordinates, 'delivery_changed', 'operation',
            'the delivery came back as another operation or with another meaning', p_tenant, p_operation, p_type, p_version,
            p_event_id, v_delivery.meaning, v_meaning, 1, p_headers, p_payload);
        RETURN;
    END IF;

    INSERT INTO fencepost.reservation (tenant, consumer, operation, type, version, event_id, source, epoch, meaning, event_time, coordinates)
    VALUES (p_tenant, p_consumer, p_operation, p_type, p_version, p_event_id, p_source, p_epoch, v_meaning, p_event_time, p_coordinates)
    ON CONFLICT (tenant, consumer, operation, type) DO NOTHING;
    IF FOUND THEN
        -- Invariant: inserted first, the horizon read by a later statement. Whatever purge hid an older reservation from the
        -- insertion has committed, and its horizon before it, so this statement sees it.
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            -- This snapshot may be older than that: raises 40001 if the row came, or was changed, after it.
            INSERT INTO fencepost.consumer (consumer) VALUES (p_consumer) ON CONFLICT DO NOTHING;
        END IF;
        SELECT coalesce(f.horizon, c.horizon) INTO v_horizon
        FROM fencepost.consumer AS c LEFT JOIN fencepost.consumer_forever AS f ON f.consumer = c.consumer AND f.type = p_type
        WHERE c.consumer = p_consumer;
        outcome := 'reserved';
        IF p_event_time < v_horizon AND NOT EXISTS (
            SELECT FROM fencepost.dead_letter AS d
            WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates AND d.arrived_meaning = v_meaning AND d.unhandled) THEN
            outcome := 'before_horizon';
            DELETE FROM fencepost.reservation AS r
            WHERE r.tenant = p_tenant AND r.consumer = p_consumer AND r.operation = p_operation AND r.type = p_type;
            PERFORM fencepost._dead_letter(p_consumer, p_coordinates, 'before_horizon', 'event_time',
                'the event is older than what this consumer remembers, so nothing can tell whether it was handled',
                p_tenant, p_operation, p_type, p_version, p_event_id, NULL, v_meaning, 1, p_headers, p_payload);
        END IF;
        RETURN;
    END IF;
    SELECT r.meaning, r.epoch INTO v_reserved FROM fencepost.reservation AS r
    WHERE r.tenant = p_tenant AND r.consumer = p_consumer AND r.operation = p_operation AND r.type = p_type;
    IF NOT FOUND THEN
        RAISE serialization_failure USING MESSAGE = 'the operation was reserved after this snapshot', HINT = 'retry the transaction';
    ELSIF v_reserved.meaning = v_meaning THEN
        outcome := 'duplicate';
        other_epoch := v_reserved.epoch <> p_epoch;
    ELSE
        outcome := 'conflict';
        PERFORM fencepost._dead_letter(p_consumer, p_coordinates, 'conflict', 'operation',
            'the operation was already handled with another meaning', p_tenant, p_operation, p_type, p_version,
            p_event_id, v_reserved.meaning, v_meaning, 1, p_headers, p_payload);
    END IF;
END $$;
