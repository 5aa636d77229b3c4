-- Registers a class of jobs or changes its policy; the handler's process calls it before it claims. A limit of each tenant
-- makes the class fair, and where the class has no limit of its own, that is 1,000.
-- Locks: the class; where it becomes limited then every claim, for what they took before has to be counted.
CREATE OR REPLACE FUNCTION fencepost.register_class(
    p_class text, p_policy text, p_lease interval, p_max_attempts integer, p_max_finishes integer,
    p_backoff_base interval, p_backoff_max interval, p_max_effect_timeout interval, p_network_bound interval,
    p_queue text DEFAULT 'default', p_limit integer DEFAULT NULL, p_tenant_limit integer DEFAULT NULL, p_fair boolean DEFAULT false)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_limit integer := coalesce(p_limit, CASE WHEN p_tenant_limit IS NOT NULL THEN 1000 END);
    v_fair boolean := p_fair OR p_tenant_limit IS NOT NULL;
    v_was fencepost.job_class;
BEGIN
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_identity('queue', p_queue);
    IF p_policy IS NULL OR p_policy NOT IN ('strict', 'resumable') THEN
        PERFORM fencepost._refuse('ZF003', 'policy is neither strict nor resumable', 'policy', NULL);
    ELSIF p_lease IS NULL OR p_lease NOT BETWEEN interval '0.1 second' AND interval '1 day' THEN
        PERFORM fencepost._refuse('ZF003', 'lease is not between 0.1 seconds and a day', 'lease', NULL);
    ELSIF p_max_attempts IS NULL OR p_max_attempts NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'max_attempts is not between 1 and 1000', 'max_attempts', NULL);
    ELSIF p_max_effect_timeout IS NULL OR p_max_effect_timeout NOT BETWEEN interval '0.05 second' AND interval '1 day' THEN
        PERFORM fencepost._refuse('ZF003', 'max_effect_timeout is not between 0.05 seconds and a day', 'max_effect_timeout', NULL);
    ELSIF p_max_finishes IS NULL OR p_max_finishes NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'max_finishes is not between 1 and 1000', 'max_finishes', NULL);
    ELSIF p_backoff_base IS NULL OR p_backoff_max IS NULL OR p_backoff_base < interval '0' OR p_backoff_max < p_backoff_base
          OR p_backoff_max > interval '30 days' THEN
        PERFORM fencepost._refuse('ZF003', 'backoff is not 0 <= base <= max <= 30 days', 'backoff', NULL);
    ELSIF p_network_bound IS NULL OR p_network_bound NOT BETWEEN interval '0' AND interval '1 day' THEN
        PERFORM fencepost._refuse('ZF003', 'network_bound is not between 0 and a day', 'network_bound', NULL);
    ELSIF p_limit NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'limit is not between 1 and 1000', 'limit', 'leave it out for a class without one');
    ELSIF p_tenant_limit NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'tenant_limit is not between 1 and 1000', 'tenant_limit',
            'leave it out for a class without one');
    ELSIF p_fair IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'fair is neither true nor false', 'fair', NULL);
    END IF;
    SELECT c.* INTO v_was FROM fencepost.job_class AS c WHERE c.class = p_class FOR NO KEY UPDATE;
    INSERT INTO fencepost.job_class AS c (class, policy, lease, max_attempts, max_finishes, backoff_base, backoff_max,
        max_effect_timeout, network_bound, queue, job_limit, tenant_limit, fair)
    VALUES (p_class, p_policy, p_lease, p_max_attempts, p_max_finishes, p_backoff_base, p_backoff_max,
        p_max_effect_timeout, p_network_bound, p_queue, v_limit, p_tenant_limit, v_fair)
    ON CONFLICT (class) DO UPDATE SET policy = p_policy, lease = p_lease, max_attempts = p_max_attempts,
        max_finishes = p_max_finishes, backoff_base = p_backoff_base, backoff_max = p_backoff_max,
        max_effect_timeout = p_max_effect_timeout, network_bound = p_network_bound,
        queue = p_queue, job_limit = v_limit, tenant_limit = p_tenant_limit, fair = v_fair, registered_at = clock_timestamp()
    WHERE (c.policy, c.lease, c.max_attempts, c.max_finishes, c.backoff_base, c.backoff_max, c.max_effect_timeout, c.network_bound)
       IS DISTINCT FROM (p_policy, p_lease, p_max_attempts, p_max_finishes, p_backoff_base, p_backoff_max, p_max_effect_timeout, p_network_bound)
       OR (c.queue, c.job_limit, c.tenant_limit, c.fair) IS DISTINCT FROM (p_queue, v_limit, p_tenant_limit, v_fair);
    IF v_limit IS NOT NULL AND v_was.job_limit IS NULL THEN
        LOCK TABLE fencepost.paused IN EXCLUSIVE MODE;
        -- Invariant: whatever runs has a pointer to the end of its lease.
        PERFORM fencepost._note_turn(p_class, NULL, array_agg(a.tenant), array_agg(a.operation))
        FROM fencepost.agenda AS a WHERE a.class = p_class AND a.priority = 2147483647;
    END IF;
    IF v_fair AND v_was.fair IS NOT TRUE THEN
        -- The rest, and what is being submitted now, is marked by claims and `marks` as it comes up.
        UPDATE fencepost.agenda AS x SET fair_class = p_class WHERE x.ctid = ANY (ARRAY(
            SELECT a.ctid FROM fencepost.agenda AS a
            WHERE a.class = p_class AND a.priority < 2147483646 AND a.fair_class IS NULL LIMIT 100000 FOR UPDATE SKIP LOCKED));
    END IF;
END $$;
