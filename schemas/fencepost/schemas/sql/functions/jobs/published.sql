-- Reads back what an ambiguous COMMIT did: true when this attempt completed the job. Waits at most five seconds for the
-- job row, because a transaction that may still commit holds it: false is then definite, a lock timeout is not an answer.
-- Locks: the job row.
CREATE OR REPLACE FUNCTION fencepost.published(p_tenant text, p_operation text, p_class text, p_attempt uuid)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_done_attempt uuid;
BEGIN
    SELECT j.done_attempt INTO v_done_attempt FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class FOR NO KEY UPDATE;
    RETURN coalesce(v_done_attempt = p_attempt, false);
END $$;

-- Reads back an ambiguous begin: the version the effect has under this effect attempt, or null when it was not begun.
-- Locks: the job row, for the same reason.
CREATE OR REPLACE FUNCTION fencepost.begun(
    p_tenant text, p_operation text, p_class text, p_effect_key text, p_effect_attempt uuid)
RETURNS integer LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_version integer;
BEGIN
    PERFORM FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class FOR NO KEY UPDATE;
    SELECT e.version INTO v_version FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key
      AND e.effect_attempt = p_effect_attempt AND e.state = 'pending';
    RETURN v_version;
END $$;
