CREATE OR REPLACE FUNCTION fencepost._dead_letter(
    p_consumer text, p_coordinates text, p_reason text, p_field text, p_detail text, p_tenant text, p_operation text,
    p_type text, p_version integer, p_event_id uuid, p_stored_meaning bytea, p_arrived_meaning bytea, p_attempts integer,
    p_headers jsonb, p_payload bytea)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO fencepost.dead_letter AS d (consumer, coordinates, reason, field, detail, tenant, operation, type, version,
        event_id, stored_meaning, arrived_meaning, attempts, headers, payload, content)
    VALUES (p_consumer, p_coordinates, p_reason, p_field, p_detail, p_tenant, p_operation, p_type, p_version,
        p_event_id, p_stored_meaning, p_arrived_meaning, p_attempts, p_headers, p_payload,
        sha256(convert_to(p_headers::text, 'UTF8') || p_payload))
    ON CONFLICT (consumer, coordinates, reason, content) DO UPDATE
    SET attempts = d.attempts + excluded.attempts, field = excluded.field, detail = excluded.detail,
        stored_meaning = excluded.stored_meaning, arrived_meaning = excluded.arrived_meaning, last_at = clock_timestamp()
$$;

-- Refuses coordinates that name nothing, or more than an index can hold.
CREATE OR REPLACE FUNCTION fencepost._require_coordinates(p_coordinates text)
RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_coordinates IS NULL OR p_coordinates = '' OR octet_length(p_coordinates) > 1500 THEN
        PERFORM fencepost._refuse('ZF003', 'coordinates are empty or longer than 1500 bytes', 'coordinates',
            'name broker, place and message');
    END IF;
END $$;

-- Keeps a delivery that cannot be handled: unreadable, of a type or version that nobody here knows, or failed by its handler
-- too often. Once per delivery, reason and content; again is counted. p_meaning: what it means, where that could be read.
CREATE OR REPLACE FUNCTION fencepost.dead_letter(
    p_consumer text, p_coordinates text, p_reason text, p_field text, p_detail text, p_tenant text, p_operation text,
    p_type text, p_version integer, p_event_id uuid, p_attempts integer, p_headers jsonb, p_payload bytea,
    p_meaning bytea DEFAULT NULL)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._require_identity('consumer', p_consumer);
    IF p_reason IS NULL OR p_reason NOT IN ('undecodable', 'unknown_type', 'newer_version', 'handler_failed') THEN
        PERFORM fencepost._refuse('ZF003', 'reason is not undecodable, unknown_type, newer_version or handler_failed', 'reason', NULL);
    END IF;
    PERFORM fencepost._require_coordinates(p_coordinates);
    IF p_headers IS NULL OR p_payload IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'headers or payload are null', 'payload', 'give what arrived, empty if there was nothing');
    ELSIF octet_length(p_meaning) <> 33 THEN
        PERFORM fencepost._refuse('ZF003', 'meaning is not 33 bytes long', 'meaning', 'a tag and a sha256, or null');
    END IF;
    -- Others act upon this commit (a broker is acked, an operator is told): it must survive a crash.
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM fencepost._dead_letter(p_consumer, p_coordinates, p_reason, p_field, coalesce(p_detail, ''), p_tenant, p_operation, p_type,
        p_version, p_event_id, NULL, p_meaning, greatest(p_attempts, 1), p_headers, p_payload);
END $$;
