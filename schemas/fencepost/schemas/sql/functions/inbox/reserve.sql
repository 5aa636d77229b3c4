-- Whether a reservation looks like nearly all of them do, and nothing of it is to be refused; anything else is judged part by
-- part. One expression without a call of its own, and of few parts, for it is made anew in every transaction; a counted
-- repetition in the pattern would cost more than all else of it. What is null makes it null.
CREATE OR REPLACE FUNCTION fencepost._is_plain_reservation(
    p_tenant text, p_consumer text, p_operation text, p_type text, p_version integer, p_event_id uuid, p_source text,
    p_epoch bigint, p_binding text, p_event_time timestamptz, p_coordinates text)
RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT (p_tenant || p_consumer || p_operation || p_type) ~ '^[!-~]+$'
       AND '' <> ALL (ARRAY[p_tenant, p_consumer, p_operation, p_type, p_source, p_coordinates])
       AND greatest(octet_length(p_tenant), octet_length(p_consumer), octet_length(p_operation), octet_length(p_type),
                    octet_length(p_source)) <= 200 AND octet_length(p_coordinates) <= 1500
       AND p_version BETWEEN 1 AND 32767 AND p_epoch >= 0 AND p_event_id IS NOT NULL AND p_event_time IS NOT NULL
       AND octet_length(p_binding) = 75 AND p_binding ~ '^jcs-sha256:[0-9a-f]+$'
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
-- Locks: the reservation, then the delivery that has none. A copy waits, too, for whoever counts the reserved delivery again.
CREATE OR REPLACE FUNCTION fencepost.reserve(
    p_tenant text, p_consumer text, p_operation text, p_type text, p_version integer, p_event_id uuid, p_source text,
    p_epoch bigint, p_binding text, p_event_time timestamptz, p_coordinates text, p_headers jsonb, p_payload bytea,
    p_wait_ms integer DEFAULT NULL, OUT outcome text, OUT arrivals integer, OUT other_epoch boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_ordinary boolean;
    v_settings text[];
    v_ignored text;
BEGIN
    -- Few and large expressions on the way of an ordinary event: PL/pgSQL makes each of them anew in every transaction.
    -- Before the first statement that may wait: what was, what is, and the mark.
    v_settings := CASE WHEN fencepost._is_plain_reservation(p_tenant, p_consumer, p_operation, p_type, p_version, p_event_id,
                                                            p_source, p_epoch, p_binding, p_event_time, p_coordinates)
            AND (p_headers IS NULL) = (p_payload IS NULL)
            AND coalesce(p_wait_ms, 1) >= 1 AND current_setting('synchronous_commit') = 'on' THEN
        CASE WHEN p_wait_ms IS NULL THEN '{}' ELSE ARRAY[
            current_setting('lock_timeout'), set_config('lock_timeout', p_wait_ms::text, true),
            set_config('application_name', left(current_setting('application_name'), 50) || ' (inbox)', true)] END END;
    IF v_settings IS NULL THEN
        PERFORM fencepost._require_reservable(p_tenant, p_consumer, p_operation, p_type, p_version, p_event_id, p_source, p_epoch,
            p_binding, p_event_time, p_coordinates, p_headers, p_payload);
        IF p_wait_ms < 1 THEN
            PERFORM fencepost._refuse('ZF003', 'wait_ms is less than 1', 'wait_ms', NULL);
        END IF;
        -- Others act upon this commit (a broker is acked, an operator is told): it must survive a crash.
        PERFORM set_config('synchronous_commit', 'on', true);
        v_settings := CASE WHEN p_wait_ms IS NOT NULL THEN ARRAY[
            current_setting('lock_timeout'), set_config('lock_timeout', p_wait_ms::text, true),
            set_config('application_name', left(current_setting('application_name'), 50) || ' (inbox)', true)] END;
    END IF;

    -- An operation and the delivery that it was reserved with are one row: a second insertion would cost as much again.
    INSERT INTO fencepost.reservation AS r (tenant, consumer, operation, type, version, event_id, source, epoch, meaning, event_time, coordinates)
    VALUES (p_tenant, p_consumer, p_operation, p_type, p_version, p_event_id, p_source, p_epoch,
        fencepost.meaning(p_tenant, p_operation, p_type, p_version, p_binding), p_event_time, p_coordinates)
    ON CONFLICT DO NOTHING
    -- Ordinary is what nobody has to be asked about. Nothing so young was ever forgotten: purges keep a grace period of an hour
    -- at least, behind a horizon that no clock is ahead of. And its epoch is in force and its delivery new, unless the insertion
    -- has waited, or looked at an old snapshot: then all is looked at again.
    RETURNING 'reserved', 1, false, r.event_time >= clock_timestamp() - interval '1 hour'
        AND clock_timestamp() <= statement_timestamp() + interval '5 milliseconds'
        AND current_setting('transaction_isolation') = 'read committed'
        AND (SELECT p_epoch >= i.epoch_counter OR p_source <> 'urn:fencepost:' || i.id FROM fencepost.installation AS i)
        AND NOT EXISTS (SELECT FROM fencepost.unreserved_delivery AS d WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates)
    INTO outcome, arrivals, other_epoch, v_ordinary;
    IF v_ordinary IS NOT TRUE THEN
        SELECT j.* INTO outcome, arrivals, other_epoch
        FROM fencepost._judge_reservation(FOUND, p_tenant, p_consumer, p_operation, p_type, p_version, p_event_id,
            p_source, p_epoch, fencepost.meaning(p_tenant, p_operation, p_type, p_version, p_binding), p_event_time, p_coordinates,
            p_headers, p_payload) AS j;
    END IF;
    v_ignored := CASE WHEN p_wait_ms IS NOT NULL THEN set_config('lock_timeout', v_settings[1], true) END;
END $$;

-- What a reservation that is not ordinary comes to; `p_made`: the statement before has inserted it, else something was there.
CREATE OR REPLACE FUNCTION fencepost._judge_reservation(
    p_made boolean, p_tenant text, p_consumer text, p_operation text, p_type text, p_version integer, p_event_id uuid,
    p_source text, p_epoch bigint, p_meaning bytea, p_event_time timestamptz, p_coordinates text, p_headers jsonb, p_payload bytea,
    OUT outcome text, OUT arrivals integer, OUT other_epoch boolean)
LANGUAGE plpgsql AS $$
DECLARE
    v_delivery fencepost.delivery;
    v_known bytea;
    v_epoch bigint;
    v_horizon timestamptz;
BEGIN
    other_epoch := false;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- This snapshot may be older than what it is to be compared with. An insertion that meets a row which came, or was
        -- changed, after the snapshot raises 40001: of the delivery without a reservation, of the horizon, of a rotation.
        INSERT INTO fencepost.unreserved_delivery (consumer, coordinates, tenant, operation, type, meaning, event_id, arrivals)
        VALUES (p_consumer, p_coordinates, p_tenant, p_operation, p_type, p_meaning, p_event_id, 0) ON CONFLICT DO NOTHING;
        DELETE FROM fencepost.unreserved_delivery AS d
        WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates AND d.arrivals = 0;
        IF p_made THEN
            INSERT INTO fencepost.consumer (consumer) VALUES (p_consumer) ON CONFLICT DO NOTHING;
            INSERT INTO fencepost.installation SELECT i.* FROM fencepost.installation AS i
            WHERE p_source = 'urn:fencepost:' || i.id ON CONFLICT DO NOTHING;
        END IF;
    END IF;
    -- The delivery, where it was here before.
    IF NOT p_made THEN
        UPDATE fencepost.reservation AS r SET arrivals = r.arrivals + 1, last_at = clock_timestamp()
        WHERE r.consumer = p_consumer AND r.coordinates = p_coordinates
          AND (r.tenant, r.operation, r.type, r.meaning) = (p_tenant, p_operation, p_type, p_meaning)
        RETURNING 'duplicate', r.arrivals, r.epoch <> p_epoch INTO outcome, arrivals, other_epoch;
        IF FOUND THEN
            RETURN;
        END IF;
        other_epoch := false;
    END IF;
    SELECT d.* INTO v_delivery FROM fencepost.delivery AS d
    WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates AND (d.unreserved OR NOT p_made) ORDER BY d.unreserved LIMIT 1;

    IF (v_delivery.tenant, v_delivery.operation, v_delivery.type, v_delivery.meaning) <> (p_tenant, p_operation, p_type, p_meaning) THEN
        outcome := 'delivery_changed';
        v_known := v_delivery.meaning;
    ELSIF NOT p_made THEN
        SELECT r.meaning, r.epoch INTO v_known, v_epoch FROM fencepost.reservation AS r
        WHERE r.tenant = p_tenant AND r.consumer = p_consumer AND r.operation = p_operation AND r.type = p_type;
        IF NOT FOUND THEN
            RAISE serialization_failure USING MESSAGE = 'the operation was reserved after this snapshot', HINT = 'retry the transaction';
        END IF;
        outcome := CASE WHEN v_known = p_meaning THEN 'duplicate' ELSE 'conflict' END;
        other_epoch := v_known = p_meaning AND v_epoch <> p_epoch;
    ELSE
        -- Invariant: inserted first, the horizon read by a later statement. Whatever purge hid an older reservation from the
        -- insertion has committed, and its horizon before it, so this statement sees it.
        SELECT c.horizon INTO v_horizon FROM fencepost.consumer AS c WHERE c.consumer = p_consumer;
        -- Invariant: nothing from here stays reserved by a statement that begins after the commit of the rotation which ended its
        -- epoch. Who began before that commit and ends after it is like a handler that was under way: an authority that was in
        -- use already. Who is here looks again, for it may have waited for another copy in between.
        IF fencepost._is_of_old_epoch(p_tenant, p_consumer, p_source, p_epoch, p_event_id, p_meaning, p_coordinates) THEN
            outcome := 'old_epoch';
        -- A type that is kept for ever has a horizon of its own, which is no younger.
        ELSIF p_event_time < v_horizon
              AND p_event_time < coalesce((SELECT f.horizon FROM fencepost.consumer_forever AS f
                                           WHERE f.consumer = p_consumer AND f.type = p_type), v_horizon)
              AND NOT EXISTS (SELECT FROM fencepost.dead_letter AS d
                              WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates AND d.arrived_meaning = p_meaning
                                AND d.unhandled) THEN
            outcome := 'before_horizon';
        ELSE
            outcome := 'reserved';
            DELETE FROM fencepost.unreserved_delivery AS d WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates
            RETURNING d.arrivals + 1 INTO arrivals;
            IF FOUND THEN
                UPDATE fencepost.reservation AS r SET arrivals = _judge_reservation.arrivals
                WHERE r.consumer = p_consumer AND r.coordinates = p_coordinates;
            ELSE
                arrivals := 1;
            END IF;
            RETURN;
        END IF;
    END IF;

    -- It is not to be handled.
    IF p_made THEN
        DELETE FROM fencepost.reservation AS r
        WHERE r.tenant = p_tenant AND r.consumer = p_consumer AND r.operation = p_operation AND r.type = p_type;
    END IF;
    IF outcome <> 'duplicate' AND p_payload IS NULL THEN
        outcome := 'alone';
        arrivals := 0;
        RETURN;
    END IF;
    IF outcome = 'delivery_changed' AND NOT v_delivery.unreserved THEN
        UPDATE fencepost.reservation AS r SET arrivals = r.arrivals + 1, last_at = clock_timestamp()
        WHERE r.consumer = p_consumer AND r.coordinates = p_coordinates RETURNING r.arrivals INTO arrivals;
    ELSE
        -- A delivery that has changed keeps the meaning that it came with at first.
        INSERT INTO fencepost.unreserved_delivery AS d (consumer, coordinates, tenant, operation, type, meaning, event_id)
        VALUES (p_consumer, p_coordinates, p_tenant, p_operation, p_type, p_meaning, p_event_id)
        ON CONFLICT (consumer, coordinates) DO UPDATE SET arrivals = d.arrivals + 1, last_at = clock_timestamp()
        WHERE outcome = 'delivery_changed'
           OR (d.tenant, d.operation, d.type, d.meaning) = (excluded.tenant, excluded.operation, excluded.type, excluded.meaning)
        RETURNING d.arrivals INTO arrivals;
    END IF;
    IF arrivals IS NULL THEN
        RAISE serialization_failure USING MESSAGE = 'the delivery was changed after this snapshot', HINT = 'retry the transaction';
    END IF;
    CASE outcome
    WHEN 'duplicate' THEN
        NULL;
    WHEN 'delivery_changed' THEN
        PERFORM fencepost._dead_letter(p_consumer, p_coordinates, 'delivery_changed', 'operation',
            'the delivery came back as another operation or with another meaning', p_tenant, p_operation, p_type, p_version,
            p_event_id, v_known, p_meaning, 1, p_headers, p_payload);
        outcome := 'conflict';
    WHEN 'conflict' THEN
        PERFORM fencepost._dead_letter(p_consumer, p_coordinates, 'conflict', 'operation',
            'the operation was already handled with another meaning', p_tenant, p_operation, p_type, p_version,
            p_event_id, v_known, p_meaning, 1, p_headers, p_payload);
    WHEN 'old_epoch' THEN
        PERFORM fencepost._dead_letter(p_consumer, p_coordinates, 'old_epoch', 'epoch',
            format('accepted here under epoch %s, and the tenant stands at epoch %s', p_epoch, fencepost._epoch(p_tenant)),
            p_tenant, p_operation, p_type, p_version, p_event_id, NULL, p_meaning, 1, p_headers, p_payload);
    WHEN 'before_horizon' THEN
        PERFORM fencepost._dead_letter(p_consumer, p_coordinates, 'before_horizon', 'event_time',
            'the event is older than what this consumer remembers, so nothing can tell whether it was handled',
            p_tenant, p_operation, p_type, p_version, p_event_id, NULL, p_meaning, 1, p_headers, p_payload);
    END CASE;
END $$;
