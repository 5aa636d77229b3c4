-- Whether a reservation looks like nearly all of them do, and nothing of it is to be refused; anything else is judged part by
-- part. One expression without a call of its own, for it is part of every reservation; a counted repetition in the pattern
-- would cost more than all else of it.
CREATE OR REPLACE FUNCTION fencepost._is_plain_reservation(
    p_tenant text, p_consumer text, p_operation text, p_type text, p_version integer, p_event_id uuid, p_source text,
    p_epoch bigint, p_binding text, p_event_time timestamptz, p_coordinates text)
RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT (p_tenant || p_consumer || p_operation || p_type) ~ '^[!-~]+$' AND octet_length(p_tenant) BETWEEN 1 AND 200
       AND octet_length(p_consumer) BETWEEN 1 AND 200 AND octet_length(p_operation) BETWEEN 1 AND 200 AND octet_length(p_type) BETWEEN 1 AND 200
       AND p_version BETWEEN 1 AND 32767 AND p_event_id IS NOT NULL AND octet_length(p_source) BETWEEN 1 AND 200
       AND p_epoch >= 0 AND octet_length(p_binding) = 75 AND starts_with(p_binding, 'jcs-sha256:')
       AND substr(p_binding, 12) !~ '[^0-9a-f]' AND p_event_time IS NOT NULL
       AND octet_length(p_coordinates) BETWEEN 1 AND 1500
$$;

-- What a reservation needs, or the refusal that names the first part that is wrong.
CREATE OR REPLACE FUNCTION fencepost._require_reservable(
    p_tenant text, p_consumer text, p_operation text, p_type text, p_version integer, p_event_id uuid, p_source text,
    p_epoch bigint, p_binding text, p_event_time timestamptz, p_coordinates text, p_headers jsonb, p_payload bytea)
RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
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
    ELSIF (p_headers IS NULL) <> (p_payload IS NULL) THEN
        PERFORM fencepost._refuse('ZF003', 'headers or payload are null', 'payload', 'give both, or none');
    END IF;
END $$;

-- Reserves an operation for a consumer inside the handler's transaction: committed with its changes or not at all.
-- outcome: reserved (handle it), duplicate (already handled with this meaning), conflict (kept as a dead letter with
-- both meanings, not handled), before_horizon (nothing is known of it and it is older than what is remembered: kept as a
-- dead letter, not handled), old_epoch (nothing is known of it, and it is from here and of an epoch that is over: kept as a
-- dead letter, not handled). Without headers and payload nothing can be kept: then alone says that nothing is recorded, and
-- that it has to be given once more, with them. Concurrent copies wait for the first transaction; bound it with lock_timeout,
-- or with p_wait_ms, which leaves lock_timeout as it was, and marks application_name until the transaction ends: the server
-- reports the name when it goes back, so a client sees without asking whether its transaction stands.
CREATE OR REPLACE FUNCTION fencepost.reserve(
    p_tenant text, p_consumer text, p_operation text, p_type text, p_version integer, p_event_id uuid, p_source text,
    p_epoch bigint, p_binding text, p_event_time timestamptz, p_coordinates text, p_headers jsonb, p_payload bytea,
    p_wait_ms integer DEFAULT NULL, OUT outcome text, OUT arrivals integer, OUT other_epoch boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_meaning bytea;
    v_known bytea;
    v_epoch bigint;
    v_in_force boolean;
    v_horizon timestamptz;
    v_unreserved boolean;
    v_settings text[];
    v_ignored text;
BEGIN
    -- Few and large expressions on the way of an ordinary event: PL/pgSQL makes each of them anew in every transaction.
    IF (fencepost._is_plain_reservation(p_tenant, p_consumer, p_operation, p_type, p_version, p_event_id, p_source, p_epoch,
                                        p_binding, p_event_time, p_coordinates)
        AND (p_headers IS NULL) = (p_payload IS NULL)
        AND coalesce(p_wait_ms, 1) >= 1 AND current_setting('synchronous_commit') = 'on') IS NOT TRUE THEN
        PERFORM fencepost._require_reservable(p_tenant, p_consumer, p_operation, p_type, p_version, p_event_id, p_source, p_epoch,
            p_binding, p_event_time, p_coordinates, p_headers, p_payload);
        IF p_wait_ms < 1 THEN
            PERFORM fencepost._refuse('ZF003', 'wait_ms is less than 1', 'wait_ms', NULL);
        END IF;
        -- Others act upon this commit (a broker is acked, an operator is told): it must survive a crash.
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    -- Before the first statement that may wait: what was, what is, and the mark.
    v_settings := CASE WHEN p_wait_ms IS NOT NULL THEN ARRAY[
        current_setting('lock_timeout'), set_config('lock_timeout', p_wait_ms::text, true),
        set_config('application_name', left(current_setting('application_name'), 50) || ' (inbox)', true)] END;

    INSERT INTO fencepost.delivery AS d (consumer, coordinates, tenant, operation, type, meaning, event_id)
    VALUES (p_consumer, p_coordinates, p_tenant, p_operation, p_type,
        fencepost.meaning(p_tenant, p_operation, p_type, p_version, p_binding), p_event_id)
    ON CONFLICT (consumer, coordinates) DO UPDATE SET arrivals = d.arrivals + 1, last_at = clock_timestamp()
    WHERE (d.tenant, d.operation, d.type, d.meaning) = (excluded.tenant, excluded.operation, excluded.type, excluded.meaning)
    RETURNING d.arrivals, d.meaning, 'reserved', false INTO arrivals, v_meaning, outcome, other_epoch;
    IF NOT FOUND THEN
        other_epoch := false;
        IF p_payload IS NULL THEN
            outcome := 'alone';
            arrivals := 0;
        ELSE
            v_meaning := fencepost.meaning(p_tenant, p_operation, p_type, p_version, p_binding);
            UPDATE fencepost.delivery AS d SET arrivals = d.arrivals + 1, last_at = clock_timestamp()
            WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates RETURNING d.arrivals, d.meaning INTO arrivals, v_known;
            outcome := 'conflict';
            PERFORM fencepost._dead_letter(p_consumer, p_coordinates, 'delivery_changed', 'operation',
                'the delivery came back as another operation or with another meaning', p_tenant, p_operation, p_type, p_version,
                p_event_id, v_known, v_meaning, 1, p_headers, p_payload);
        END IF;
        v_ignored := CASE WHEN p_wait_ms IS NOT NULL THEN set_config('lock_timeout', v_settings[1], true) END;
        RETURN;
    END IF;

    INSERT INTO fencepost.reservation (tenant, consumer, operation, type, version, event_id, source, epoch, meaning, event_time, coordinates)
    VALUES (p_tenant, p_consumer, p_operation, p_type, p_version, p_event_id, p_source, p_epoch, v_meaning, p_event_time, p_coordinates)
    ON CONFLICT (tenant, consumer, operation, type) DO NOTHING
    -- Nearly always true, and then the epoch is in force; a statement of its own would cost more than this whole insertion.
    RETURNING (SELECT p_epoch >= i.epoch_counter OR p_source <> 'urn:fencepost:' || i.id FROM fencepost.installation AS i)
    INTO v_in_force;
    IF FOUND THEN
        -- Nothing so young was ever forgotten: purges keep a grace period of an hour at least, behind a horizon that no clock
        -- is ahead of. And its epoch is in force, unless the insertion waited, or looked at an old snapshot: see below.
        IF p_event_time >= clock_timestamp() - interval '1 hour' AND v_in_force
           AND clock_timestamp() <= statement_timestamp() + interval '5 milliseconds'
           AND current_setting('transaction_isolation') = 'read committed' THEN
            v_ignored := CASE WHEN p_wait_ms IS NOT NULL THEN set_config('lock_timeout', v_settings[1], true) END;
            RETURN;
        END IF;
        -- Invariant: inserted first, the horizon read by a later statement. Whatever purge hid an older reservation from the
        -- insertion has committed, and its horizon before it, so this statement sees it.
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            -- This snapshot may be older than that: raises 40001 if the row came, or was changed, after it.
            INSERT INTO fencepost.consumer (consumer) VALUES (p_consumer) ON CONFLICT DO NOTHING;
            -- And older than a rotation, which changes this row: the same.
            INSERT INTO fencepost.installation SELECT i.* FROM fencepost.installation AS i
            WHERE p_source = 'urn:fencepost:' || i.id ON CONFLICT DO NOTHING;
        END IF;
        SELECT c.horizon INTO v_horizon FROM fencepost.consumer AS c WHERE c.consumer = p_consumer;
        -- Invariant: nothing from here stays reserved by a statement that begins after the commit of the rotation which ended its
        -- epoch. Who began before that commit and ends after it is like a handler that was under way: an authority that was in
        -- use already. Who has waited for another copy in between looks again all the same.
        IF (NOT v_in_force OR clock_timestamp() > statement_timestamp() + interval '5 milliseconds')
           AND fencepost._is_of_old_epoch(p_tenant, p_consumer, p_source, p_epoch, p_event_id, v_meaning, p_coordinates) THEN
            DELETE FROM fencepost.reservation AS r
            WHERE r.tenant = p_tenant AND r.consumer = p_consumer AND r.operation = p_operation AND r.type = p_type;
            outcome := 'old_epoch';
        ELSIF p_event_time < v_horizon THEN
            -- A type that is kept for ever has a horizon of its own, which is no younger.
            IF p_event_time < coalesce((SELECT f.horizon FROM fencepost.consumer_forever AS f
                                        WHERE f.consumer = p_consumer AND f.type = p_type), v_horizon)
               AND NOT EXISTS (SELECT FROM fencepost.dead_letter AS d
                               WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates AND d.arrived_meaning = v_meaning
                                 AND d.unhandled) THEN
                DELETE FROM fencepost.reservation AS r
                WHERE r.tenant = p_tenant AND r.consumer = p_consumer AND r.operation = p_operation AND r.type = p_type;
                outcome := 'before_horizon';
            END IF;
        END IF;
    ELSE
        SELECT r.meaning, r.epoch, r.coordinates <> p_coordinates INTO v_known, v_epoch, v_unreserved FROM fencepost.reservation AS r
        WHERE r.tenant = p_tenant AND r.consumer = p_consumer AND r.operation = p_operation AND r.type = p_type;
        IF NOT FOUND THEN
            RAISE serialization_failure USING MESSAGE = 'the operation was reserved after this snapshot', HINT = 'retry the transaction';
        ELSIF v_known = v_meaning THEN
            outcome := 'duplicate';
            other_epoch := v_epoch <> p_epoch;
        ELSE
            outcome := 'conflict';
        END IF;
    END IF;

    -- Invariant: a delivery that is not unreserved has the reservation that was made with it.
    IF outcome <> 'reserved' AND v_unreserved IS DISTINCT FROM false THEN
        UPDATE fencepost.delivery AS d SET unreserved = true
        WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates AND NOT d.unreserved;
    END IF;
    IF outcome IN ('reserved', 'duplicate') THEN
        NULL;
    ELSIF p_payload IS NULL THEN
        -- As if it had not arrived.
        UPDATE fencepost.delivery AS d SET arrivals = d.arrivals - 1
        WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates;
        DELETE FROM fencepost.delivery AS d
        WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates AND d.arrivals = 0;
        outcome := 'alone';
        arrivals := 0;
    ELSIF outcome = 'conflict' THEN
        PERFORM fencepost._dead_letter(p_consumer, p_coordinates, 'conflict', 'operation',
            'the operation was already handled with another meaning', p_tenant, p_operation, p_type, p_version,
            p_event_id, v_known, v_meaning, 1, p_headers, p_payload);
    ELSIF outcome = 'old_epoch' THEN
        PERFORM fencepost._dead_letter(p_consumer, p_coordinates, 'old_epoch', 'epoch',
            format('accepted here under epoch %s, and the tenant stands at epoch %s', p_epoch, fencepost._epoch(p_tenant)),
            p_tenant, p_operation, p_type, p_version, p_event_id, NULL, v_meaning, 1, p_headers, p_payload);
    ELSE
        PERFORM fencepost._dead_letter(p_consumer, p_coordinates, 'before_horizon', 'event_time',
            'the event is older than what this consumer remembers, so nothing can tell whether it was handled',
            p_tenant, p_operation, p_type, p_version, p_event_id, NULL, v_meaning, 1, p_headers, p_payload);
    END IF;
    v_ignored := CASE WHEN p_wait_ms IS NOT NULL THEN set_config('lock_timeout', v_settings[1], true) END;
END $$;
