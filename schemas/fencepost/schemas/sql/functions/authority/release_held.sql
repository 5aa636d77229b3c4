-- Gives held work, and queued work of an older epoch, the current epoch: at most `p_limit` jobs of a tenant, a class, an
-- operation or everybody, beyond `p_after`. Jobs with an open effect stay as they are; a named one is refused (ZF030). What
-- has no attempt left becomes poison. `after` is where to go on, null at the end.
-- Locks: gate, then the jobs in the order of their keys.
CREATE OR REPLACE FUNCTION fencepost.release_held(
    p_tenant text, p_class text, p_operation text, p_limit integer, p_after text[], p_version bigint, p_actor text, p_reason text,
    p_evidence text, OUT released bigint, OUT open bigint, OUT after text[])
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s'
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_keys record;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 10000 THEN
        PERFORM fencepost._refuse('ZF003', 'limit is not between 1 and 10000', 'limit', NULL);
    ELSIF p_operation IS NOT NULL AND (p_tenant IS NULL OR p_class IS NULL) THEN
        PERFORM fencepost._refuse('ZF003', 'an operation needs its tenant and class', 'operation', NULL);
    END IF;
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM fencepost._require_authority_version(p_version);
    IF EXISTS (SELECT FROM fencepost.restriction AS r
               WHERE r.kind = 'tenant' AND r.subject = p_tenant OR r.kind = 'class' AND r.subject = p_class) THEN
        PERFORM fencepost._refuse('ZF061', 'the tenant is suspended, or the class is disabled', 'restriction',
            'lift it first: fencepost authority lift');
    END IF;
    IF p_operation IS NOT NULL THEN
        PERFORM FROM fencepost.job AS j
        WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class FOR NO KEY UPDATE;
        IF NOT FOUND THEN
            PERFORM fencepost._refuse('ZF050', 'there is no such job', 'operation', 'check tenant, operation and class');
        ELSIF EXISTS (SELECT FROM fencepost.job AS j
                      WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class AND j.open_effects > 0) THEN
            PERFORM fencepost._refuse('ZF030', 'an effect of this job is pending or unknown', 'effect', 'reconcile it first');
        END IF;
    END IF;
    -- First the locks, then (in a later statement) the look.
    WITH found AS MATERIALIZED (
        SELECT j.tenant, j.operation, j.class FROM fencepost.job AS j
        CROSS JOIN fencepost.installation AS i LEFT JOIN fencepost.tenant AS t ON t.tenant = j.tenant
        WHERE j.exec IN ('held', 'queued', 'waiting', 'blocked') AND (j.exec IN ('held', 'blocked') OR j.epoch <> greatest(i.floor, t.epoch))
          AND j.tenant = coalesce(p_tenant, j.tenant) AND j.class = coalesce(p_class, j.class)
          AND j.operation = coalesce(p_operation, j.operation)
          AND (p_after IS NULL OR (j.tenant, j.operation, j.class) > (p_after[1], p_after[2], p_after[3]))
        ORDER BY j.tenant, j.operation, j.class LIMIT p_limit FOR NO KEY UPDATE OF j)
    SELECT array_agg(f.tenant) AS tenants, array_agg(f.operation) AS operations, array_agg(f.class) AS classes INTO v_keys FROM found AS f;
    released := 0;
    open := 0;
    IF v_keys.tenants IS NULL THEN
        RETURN;
    END IF;
    IF cardinality(v_keys.tenants) = p_limit THEN
        after := ARRAY[v_keys.tenants[p_limit], v_keys.operations[p_limit], v_keys.classes[p_limit]];
    END IF;
    WITH looked AS (
        SELECT j.tenant, j.operation, j.class, fencepost._epoch(j.tenant) AS epoch,
               CASE WHEN j.exec <> 'held' THEN NULL
                    WHEN k.policy = 'strict' AND j.applied_effects > 0 AND j.finishes >= k.max_finishes THEN 'finishes_exhausted'
                    WHEN NOT (k.policy = 'strict' AND j.applied_effects > 0) AND j.attempts >= k.max_attempts
                    THEN 'attempts_exhausted' END AS exhausted
        FROM unnest(v_keys.tenants, v_keys.operations, v_keys.classes) AS u (tenant, operation, class)
        JOIN fencepost.job AS j ON j.tenant = u.tenant AND j.operation = u.operation AND j.class = u.class
        LEFT JOIN fencepost.job_class AS k ON k.class = j.class
        WHERE j.open_effects = 0 AND j.exec IN ('held', 'queued', 'waiting')
          AND NOT EXISTS (SELECT FROM fencepost.restriction AS r
                          WHERE r.kind = 'tenant' AND r.subject = j.tenant OR r.kind = 'class' AND r.subject = j.class)
    ), moved AS (
        UPDATE fencepost.job AS j SET epoch = l.epoch,
            exec = CASE WHEN j.exec <> 'held' THEN j.exec WHEN l.exhausted IS NULL THEN 'queued' ELSE 'poison' END,
            run_at = CASE j.exec WHEN 'held' THEN clock_timestamp() ELSE j.run_at END,
            reason = coalesce(l.exhausted, CASE j.exec WHEN 'waiting' THEN j.reason ELSE 'released' END), changed_at = clock_timestamp()
        FROM looked AS l
        WHERE j.tenant = l.tenant AND j.operation = l.operation AND j.class = l.class
        RETURNING 1)
    SELECT count(*) INTO released FROM moved;
    SELECT count(*) INTO open
    FROM unnest(v_keys.tenants, v_keys.operations, v_keys.classes) AS u (tenant, operation, class)
    JOIN fencepost.job AS j ON j.tenant = u.tenant AND j.operation = u.operation AND j.class = u.class
    WHERE j.open_effects > 0;
    IF released > 0 THEN
        PERFORM fencepost._log_authority('released', jsonb_build_object('tenant', p_tenant, 'class', p_class,
            'operation', p_operation, 'released', released, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
    END IF;
END $$;
