-- As `complete`, and keeps what the attempt returned, in the same commit.
CREATE OR REPLACE FUNCTION fencepost.complete_with(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint, p_result bytea)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_result IS NULL OR octet_length(p_result) > 65536 THEN
        PERFORM fencepost._refuse('ZF003', 'result is null or larger than 64 KiB', 'result', 'store it elsewhere and return a reference');
    END IF;
    PERFORM fencepost.complete(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    INSERT INTO fencepost.result (tenant, operation, class, attempt, result)
    VALUES (p_tenant, p_operation, p_class, p_attempt, p_result);
END $$;

-- What the attempt that completed this job returned; nothing while it is not done, or where it returned nothing, or where
-- that has left the archive too.
CREATE OR REPLACE FUNCTION fencepost.result(p_tenant text, p_operation text, p_class text)
RETURNS TABLE (result bytea, attempt uuid, at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY
    SELECT r.result, r.attempt, r.at FROM fencepost.result AS r
    WHERE r.tenant = p_tenant AND r.operation = p_operation AND r.class = p_class;
    IF NOT FOUND AND EXISTS (SELECT FROM fencepost.job AS j
                             WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class
                               AND j.archived_at IS NOT NULL) THEN
        RETURN QUERY
        SELECT r.result, r.attempt, r.at FROM fencepost.archive AS a
        CROSS JOIN LATERAL jsonb_populate_record(NULL::fencepost.result, a.content) AS r
        WHERE a.tenant = p_tenant AND a.operation = p_operation AND a.class = p_class AND a.kind = 'result';
    END IF;
END $$;
