-- Completes many jobs, each under its own fence, in one transaction: the jobs of those items whose fence is current are
-- done, the others are left as they are. Returns the refused items only: which one (from 1), the SQLSTATE that `complete`
-- would have raised for it, and the part of the fence or the field.
-- Planned anew each time, as `claim` is.
-- Locks: gate, then the job rows by tenant, operation and class; they are compared in a later statement than the one that waits.
CREATE OR REPLACE FUNCTION fencepost.complete_many(
    p_tenants text[], p_operations text[], p_classes text[], p_generations bigint[], p_attempts uuid[], p_owners text[],
    p_epochs bigint[])
RETURNS TABLE (item bigint, code text, field text) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_floor bigint;
    v_done bigint[];
BEGIN
    IF cardinality(p_tenants) IS NULL OR cardinality(p_tenants) NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'not between 1 and 1000 items', 'items', 'complete them in several batches');
    ELSIF (cardinality(p_operations), cardinality(p_classes), cardinality(p_generations), cardinality(p_attempts),
           cardinality(p_owners), cardinality(p_epochs)) IS DISTINCT FROM
          (cardinality(p_tenants), cardinality(p_tenants), cardinality(p_tenants), cardinality(p_tenants),
           cardinality(p_tenants), cardinality(p_tenants)) THEN
        PERFORM fencepost._refuse('ZF003', 'the parts of the fences are not equally many', 'items', 'give every part of every fence');
    END IF;
    PERFORM fencepost._enter();
    PERFORM FROM (SELECT u.tenant, u.operation, u.class FROM unnest(p_tenants, p_operations, p_classes) AS u (tenant, operation, class)
                  ORDER BY 1, 2, 3) AS u
    JOIN fencepost.job AS j ON j.tenant = u.tenant AND j.operation = u.operation AND j.class = u.class
    FOR NO KEY UPDATE OF j;
    SELECT i.floor INTO STRICT v_floor FROM fencepost.installation AS i;
    PERFORM set_config('synchronous_commit', 'on', true);
    WITH done AS (
        UPDATE fencepost.job AS j SET exec = 'done', done_attempt = u.attempt, attempt = NULL, owner = NULL, lease_until = NULL,
            reason = NULL, detail = '', changed_at = clock_timestamp()
        FROM unnest(p_tenants, p_operations, p_classes, p_generations, p_attempts, p_owners, p_epochs) WITH ORDINALITY
             AS u (tenant, operation, class, generation, attempt, owner, epoch, item)
        WHERE j.tenant = u.tenant AND j.operation = u.operation AND j.class = u.class
          AND j.exec = 'running' AND j.generation = u.generation AND j.attempt = u.attempt AND j.owner = u.owner
          AND j.epoch = u.epoch
          AND u.epoch = greatest(v_floor, (SELECT t.epoch FROM fencepost.tenant AS t WHERE t.tenant = u.tenant))
          AND j.lease_until > clock_timestamp() AND j.open_effects = 0
        RETURNING u.item)
    SELECT array_agg(d.item) INTO v_done FROM done AS d;
    IF cardinality(v_done) = cardinality(p_tenants) THEN
        RETURN;
    END IF;
    RETURN QUERY
    SELECT r.item, CASE r.part WHEN 'effect' THEN 'ZF030' ELSE 'ZF020' END, r.part FROM (
        SELECT u.item, CASE
            WHEN j.tenant IS NULL THEN 'operation'
            WHEN j.exec IS DISTINCT FROM 'running' THEN 'state'
            WHEN j.generation IS DISTINCT FROM u.generation THEN 'generation'
            WHEN j.attempt IS DISTINCT FROM u.attempt THEN 'attempt'
            WHEN j.owner IS DISTINCT FROM u.owner THEN 'owner'
            WHEN j.epoch IS DISTINCT FROM u.epoch OR fencepost._epoch(u.tenant) IS DISTINCT FROM u.epoch THEN 'epoch'
            WHEN j.lease_until <= clock_timestamp() THEN 'lease'
            ELSE 'effect' END AS part
        FROM unnest(p_tenants, p_operations, p_classes, p_generations, p_attempts, p_owners, p_epochs) WITH ORDINALITY
             AS u (tenant, operation, class, generation, attempt, owner, epoch, item)
        LEFT JOIN fencepost.job AS j ON j.tenant = u.tenant AND j.operation = u.operation AND j.class = u.class
        WHERE u.item <> ALL (coalesce(v_done, '{}'))) AS r
    ORDER BY r.item;
END $$;
