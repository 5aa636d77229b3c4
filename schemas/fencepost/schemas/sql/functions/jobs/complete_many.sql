-- Completes many jobs, each under its own fence, in one transaction: the jobs of those items whose fence is current are
-- done, the others are left as they are. Returns the refused items only: which one (from 1), the SQLSTATE that `complete`
-- would have raised for it, and the part of the fence or the field.
-- Invariant: jobs are reached by key in a sub-select of its own, then by the places of the locked rows, as in `claim`.
-- Locks: gate, then the job rows by tenant, operation and class; they are compared in a later statement than the one that waits.
CREATE OR REPLACE FUNCTION fencepost.complete_many(
    p_tenants text[], p_operations text[], p_classes text[], p_generations bigint[], p_attempts uuid[], p_owners text[],
    p_epochs bigint[])
RETURNS TABLE (item bigint, code text, field text) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_floor bigint;
    v_jobs tid[];
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
    SELECT array_agg(j.at ORDER BY u.item) INTO v_jobs FROM (
        SELECT k.tenant, k.operation, k.class, k.item
        FROM unnest(p_tenants, p_operations, p_classes) WITH ORDINALITY AS k (tenant, operation, class, item) ORDER BY 1, 2, 3) AS u
    LEFT JOIN LATERAL (
        SELECT k.ctid AS at FROM fencepost.job AS k
        WHERE k.tenant = u.tenant AND k.operation = u.operation AND k.class = u.class FOR NO KEY UPDATE) AS j ON true;
    SELECT i.floor INTO STRICT v_floor FROM fencepost.installation AS i;
    PERFORM set_config('synchronous_commit', 'on', true);
    WITH done AS (
        UPDATE fencepost.job AS j SET exec = 'done', done_attempt = u.attempt, attempt = NULL, owner = NULL, lease_until = NULL,
            reason = NULL, detail = '', changed_at = clock_timestamp()
        FROM unnest(v_jobs, p_generations, p_attempts, p_owners, p_epochs) WITH ORDINALITY
             AS u (at, generation, attempt, owner, epoch, item)
        WHERE j.ctid = u.at AND j.exec = 'running' AND j.generation = u.generation AND j.attempt = u.attempt AND j.owner = u.owner
          AND j.epoch = u.epoch
          AND u.epoch = greatest(v_floor, (SELECT t.epoch FROM fencepost.tenant AS t WHERE t.tenant = j.tenant))
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
        LEFT JOIN LATERAL (
            SELECT k.tenant, k.exec, k.generation, k.attempt, k.owner, k.epoch, k.lease_until FROM fencepost.job AS k
            WHERE k.tenant = u.tenant AND k.operation = u.operation AND k.class = u.class OFFSET 0) AS j ON true
        WHERE u.item <> ALL (coalesce(v_done, '{}'))) AS r
    ORDER BY r.item;
END $$;
