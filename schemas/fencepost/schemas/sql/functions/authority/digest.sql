-- One part of a digest: its length in four bytes, then the part, in the database's encoding, which is UTF8; no two lists of
-- parts look alike.
CREATE OR REPLACE FUNCTION fencepost._part(p_part text)
RETURNS bytea LANGUAGE sql STABLE STRICT PARALLEL SAFE AS $$
    SELECT int4send(octet_length(p_part)) || convert_to(p_part, 'UTF8')
$$;

-- Same operation, type, version and content: the same meaning, whatever the epoch. The first byte names the algorithm
-- (1 = sha256), the first part the use.
CREATE OR REPLACE FUNCTION fencepost.meaning(p_tenant text, p_operation text, p_type text, p_version integer, p_binding text)
RETURNS bytea LANGUAGE sql STABLE STRICT PARALLEL SAFE AS $$
    SELECT '\x01'::bytea || sha256(
        fencepost._part('fencepost.meaning.v1') || fencepost._part(p_tenant) || fencepost._part(p_operation)
        || fencepost._part(p_type) || fencepost._part(p_version::text) || fencepost._part(p_binding))
$$;

-- The meaning under an epoch.
CREATE OR REPLACE FUNCTION fencepost.digest(
    p_tenant text, p_operation text, p_type text, p_version integer, p_epoch bigint, p_binding text)
RETURNS bytea LANGUAGE sql STABLE STRICT PARALLEL SAFE AS $$
    SELECT '\x01'::bytea || sha256(
        fencepost._part('fencepost.digest.v1') || fencepost._part(p_tenant) || fencepost._part(p_operation)
        || fencepost._part(p_type) || fencepost._part(p_version::text) || fencepost._part(p_epoch::text)
        || fencepost._part(p_binding))
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
