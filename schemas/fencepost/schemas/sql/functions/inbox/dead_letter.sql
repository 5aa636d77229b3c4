CREATE OR REPLACE FUNCTION fencepost._dead_letter(
    p_consumer text, p_coordinates text, p_reason text, p_field text, p_detail text, p_tenant text, p_operation text,
    p_type text, p_version integer, p_event_id uuid, p_stored_meaning bytea, p_arrived_meaning bytea, p_attempts integer,
    p_headers jsonb, p_payload bytea)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO fencepost.dead_letter AS d (consumer, coordinates, reason, field, detail, tenant, operation, type, version,
        event_id, stored_meaning, arrived_meaning, attempts, headers, payload)
    VALUES (p_consumer, p_coordinates, p_reason, p_field, p_detail, p_tenant, p_operation, p_type, p_version,
        p_event_id, p_stored_meaning, p_arrived_meaning, p_attempts, p_headers, p_payload)
    ON CONFLICT (consumer, coordinates, reason) DO UPDATE SET attempts = d.attempts + 1
$$;

-- Keeps a delivery that cannot be handled: undecodable, or failed by its handler too often. Once per delivery and reason.
CREATE OR REPLACE FUNCTION fencepost.dead_letter(
    p_consumer text, p_coordinates text, p_reason text, p_field text, p_detail text, p_tenant text, p_operation text,
    p_type text, p_version integer, p_event_id uuid, p_attempts integer, p_headers jsonb, p_payload bytea)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._require_identity('consumer', p_consumer);
    IF p_reason IS NULL OR p_reason NOT IN ('undecodable', 'handler_failed') THEN
        PERFORM fencepost._refuse('ZF003', 'reason is neither undecodable nor handler_failed', 'reason', NULL);
    END IF;
    PERFORM fencepost._dead_letter(p_consumer, p_coordinates, p_reason, p_field, p_detail, p_tenant, p_operation, p_type,
        p_version, p_event_id, NULL, NULL, p_attempts, p_headers, p_payload);
END $$;
