-- Stores what an attempt computed, for its successor; needs no lease and gives no right to publish. Immutable: the
-- first candidate of an attempt stays; true when this call stored it.
CREATE OR REPLACE FUNCTION fencepost.stage(p_tenant text, p_operation text, p_class text, p_attempt uuid, p_result bytea)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_result IS NULL OR octet_length(p_result) > 1048576 THEN
        PERFORM fencepost._refuse('ZF003', 'result is null or larger than 1 MiB', 'result', 'store it elsewhere and stage a reference');
    END IF;
    -- Held, so that it does not leave for the archive meanwhile.
    PERFORM FROM fencepost.attempt AS a
    WHERE a.tenant = p_tenant AND a.attempt = p_attempt AND a.operation = p_operation AND a.class = p_class FOR KEY SHARE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF020', 'this attempt never held the job, or the job is archived', 'attempt',
            'stage with the fence of the claim');
    END IF;
    -- Others act upon this commit (a broker is acked, an operator is told): it must survive a crash.
    PERFORM set_config('synchronous_commit', 'on', true);
    INSERT INTO fencepost.staged (tenant, operation, class, attempt, result)
    VALUES (p_tenant, p_operation, p_class, p_attempt, p_result)
    ON CONFLICT (tenant, operation, class, attempt) DO NOTHING;
    RETURN FOUND;
END $$;

-- The newest candidate that any attempt staged for this job, or nothing.
CREATE OR REPLACE FUNCTION fencepost.staged(p_tenant text, p_operation text, p_class text)
RETURNS TABLE (attempt uuid, result bytea, staged_at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.attempt, s.result, s.staged_at FROM fencepost.staged AS s
    WHERE s.tenant = p_tenant AND s.operation = p_operation AND s.class = p_class ORDER BY s.n DESC LIMIT 1
$$;
