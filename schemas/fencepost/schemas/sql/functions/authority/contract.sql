-- Which contract this database has, and the oldest code that it still serves: code asks before it does anything.
CREATE OR REPLACE FUNCTION fencepost.contract()
RETURNS TABLE (version integer, serves integer) LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp AS $$
    SELECT 1, 1
$$;
