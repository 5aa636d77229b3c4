-- Notes how far the current attempt is; nobody else's. Waits half a second at most for the job row (55P03).
-- Locks: gate, then the job row.
CREATE OR REPLACE FUNCTION fencepost.report_progress(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint,
    p_fraction double precision, p_note text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' AS $$
BEGIN
    IF p_fraction IS NULL OR p_fraction NOT BETWEEN 0 AND 1 THEN
        PERFORM fencepost._refuse('ZF003', 'fraction is not between 0 and 1', 'fraction', NULL);
    ELSIF p_note IS NULL OR length(p_note) > 200 THEN
        PERFORM fencepost._refuse('ZF003', 'note is null or longer than 200 characters', 'note', NULL);
    END IF;
    PERFORM fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    INSERT INTO fencepost.progress AS p (tenant, operation, class, attempt, fraction, note)
    VALUES (p_tenant, p_operation, p_class, p_attempt, p_fraction, p_note)
    ON CONFLICT (tenant, operation, class) DO UPDATE
    SET attempt = p_attempt, fraction = p_fraction, note = p_note, at = clock_timestamp();
END $$;

-- What was noted last, and whether the attempt that noted it is the current one still.
CREATE OR REPLACE FUNCTION fencepost.progress(p_tenant text, p_operation text, p_class text)
RETURNS TABLE (fraction double precision, note text, attempt uuid, at timestamptz, current boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT p.fraction, p.note, p.attempt, p.at, coalesce(j.attempt = p.attempt, false) FROM fencepost.progress AS p
    JOIN fencepost.job AS j ON j.tenant = p.tenant AND j.operation = p.operation AND j.class = p.class
    WHERE p.tenant = p_tenant AND p.operation = p_operation AND p.class = p_class
$$;
