-- Length-prefixed parts under a domain tag, hashed; the first byte of the result names the algorithm (1 = sha256).
CREATE OR REPLACE FUNCTION fencepost._bind(VARIADIC p_parts text[])
RETURNS bytea LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
SET search_path = pg_catalog, pg_temp AS $$
    SELECT '\x01'::bytea || sha256(string_agg(int4send(octet_length(b)) || b, ''::bytea ORDER BY i))
    FROM (SELECT convert_to(p, 'UTF8') AS b, i FROM unnest(p_parts) WITH ORDINALITY AS u (p, i)) AS parts
$$;

-- Same operation, type, version and content: the same meaning, whatever the epoch.
CREATE OR REPLACE FUNCTION fencepost.meaning(p_tenant text, p_operation text, p_type text, p_version integer, p_binding text)
RETURNS bytea LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
SET search_path = pg_catalog, pg_temp AS $$
    SELECT fencepost._bind('fencepost.meaning.v1', p_tenant, p_operation, p_type, p_version::text, p_binding)
$$;

-- The meaning under an epoch.
CREATE OR REPLACE FUNCTION fencepost.digest(
    p_tenant text, p_operation text, p_type text, p_version integer, p_epoch bigint, p_binding text)
RETURNS bytea LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
SET search_path = pg_catalog, pg_temp AS $$
    SELECT fencepost._bind('fencepost.digest.v1', p_tenant, p_operation, p_type, p_version::text, p_epoch::text, p_binding)
$$;

-- Refuses a content binding that is neither a canonical content hash nor a reference.
CREATE OR REPLACE FUNCTION fencepost._require_binding(p_binding text)
RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_binding IS NULL OR length(p_binding) > 516 OR p_binding !~ '^(jcs-sha256:[0-9a-f]{64}|ref:[^\u0001-\u001f\u007f-\u009f]+)$' THEN
        PERFORM fencepost._refuse('ZF003', 'binding is neither jcs-sha256:<64 hex> nor ref:<reference>', 'binding',
            'compute it from the payload bytes with fencepost.schemas.content.binding');
    END IF;
END $$;
