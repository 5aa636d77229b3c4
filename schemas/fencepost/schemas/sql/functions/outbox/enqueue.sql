-- Accepts an event in the caller's transaction: committed with the domain change or not at all.
-- The same operation and type again returns the first event id; with another meaning it is a conflict (ZF010).
CREATE OR REPLACE FUNCTION fencepost.enqueue(
    p_event_id uuid, p_tenant text, p_operation text, p_type text, p_version integer, p_ordering_key text,
    p_binding text, p_content_type text, p_attributes jsonb, p_payload bytea, p_serialize boolean DEFAULT false,
    OUT event_id uuid, OUT created boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_installation fencepost.installation;
    v_xid xid8;
    v_epoch bigint;
    v_meaning bytea;
    v_now timestamptz := clock_timestamp();
    v_key record;
    v_lane bytea;
BEGIN
    PERFORM fencepost._require_identity('tenant', p_tenant);
    PERFORM fencepost._require_identity('operation', p_operation);
    PERFORM fencepost._require_identity('ordering_key', p_ordering_key);
    PERFORM fencepost._require_binding(p_binding);
    IF p_event_id IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'event_id is null', 'event_id', 'make a UUIDv7 at acceptance');
    ELSIF p_type IS NULL OR p_type !~ '^[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*$' OR length(p_type) > 120 THEN
        PERFORM fencepost._refuse('ZF003', 'type is not dotted lower-case words of at most 120 characters', 'type', 'example: report.accepted');
    ELSIF p_version IS NULL OR p_version NOT BETWEEN 1 AND 32767 THEN
        PERFORM fencepost._refuse('ZF003', 'version is not between 1 and 32767', 'version', NULL);
    ELSIF p_type ~ '\.v[0-9]+$' THEN
        PERFORM fencepost._refuse('ZF003', 'type ends in a version', 'type', 'the version is an argument of its own');
    ELSIF p_content_type IS DISTINCT FROM 'application/json' THEN
        PERFORM fencepost._refuse('ZF003', 'content_type is not application/json', 'content_type', 'other content travels by reference');
    ELSIF p_payload IS NULL OR octet_length(p_payload) NOT BETWEEN 1 AND 1048576 THEN
        PERFORM fencepost._refuse('ZF003', 'payload is empty or larger than 1 MiB', 'payload', 'store it elsewhere and send a reference');
    END IF;

    -- Invariant: the transaction id is assigned before the sequence is drawn; ticks rely on it.
    v_xid := pg_current_xact_id();
    SELECT * INTO STRICT v_installation FROM fencepost.installation;
    v_epoch := fencepost._epoch(p_tenant);
    v_meaning := fencepost.meaning(p_tenant, p_operation, p_type, p_version, p_binding);

    INSERT INTO fencepost.event_key (tenant, operation, type, event_id, meaning, recorded_at)
    VALUES (p_tenant, p_operation, p_type, p_event_id, v_meaning, v_now)
    ON CONFLICT (tenant, operation, type) DO NOTHING;
    IF NOT FOUND THEN
        SELECT k.event_id, k.meaning INTO v_key FROM fencepost.event_key AS k
        WHERE k.tenant = p_tenant AND k.operation = p_operation AND k.type = p_type;
        IF NOT FOUND THEN
            RAISE serialization_failure USING MESSAGE = 'the operation was accepted after this snapshot', HINT = 'retry the transaction';
        ELSIF v_key.meaning <> v_meaning THEN
            PERFORM fencepost._refuse('ZF010', 'the operation was already accepted with another meaning', 'operation',
                'a new request needs a new operation; a repeated one must carry the same content and version');
        END IF;
        event_id := v_key.event_id;
        created := false;
        RETURN;
    END IF;

    v_lane := sha256(int4send(octet_length(convert_to(p_tenant, 'UTF8'))) || convert_to(p_tenant, 'UTF8')
                     || convert_to(p_ordering_key, 'UTF8'));
    IF p_serialize THEN
        -- Locks: taken as late as possible, held to the end of the transaction; a collision only serialises more.
        PERFORM pg_advisory_xact_lock(('x' || encode(substr(v_lane, 9, 8), 'hex'))::bit(64)::bigint);
    END IF;
    INSERT INTO fencepost.outbox (child, slot, seq, xid, era, event_id, tenant, operation, type, version, epoch,
        ordering_key, digest, recorded_at, content_type, attributes, reference, payload)
    VALUES (v_installation.outbox_child,
        ((('x' || encode(substr(v_lane, 1, 4), 'hex'))::bit(32)::bigint & 2147483647) % v_installation.slots)::integer,
        nextval('fencepost.outbox_seq'), v_xid, v_installation.era, p_event_id, p_tenant, p_operation, p_type, p_version,
        v_epoch, p_ordering_key,
        fencepost.digest(p_tenant, p_operation, p_type, p_version, v_epoch, p_binding), v_now, p_content_type,
        p_attributes, CASE WHEN p_binding LIKE 'ref:%' THEN p_binding END, p_payload);
    -- Rings only while a relay sleeps (see doze); one look at a sequence otherwise.
    IF pg_sequence_last_value('fencepost.doorbell') > (extract(epoch FROM v_now) * 1000000)::bigint THEN
        PERFORM pg_notify('fencepost', pg_sequence_last_value('fencepost.doorbell')::text);
    END IF;
    event_id := p_event_id;
    created := true;
END $$;
