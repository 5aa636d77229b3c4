-- Registers a class of jobs or changes its policy; the handler's process calls it before it claims.
CREATE OR REPLACE FUNCTION fencepost.register_class(
    p_class text, p_policy text, p_lease interval, p_max_attempts integer, p_max_finishes integer,
    p_backoff_base interval, p_backoff_max interval, p_max_effect_timeout interval, p_network_bound interval)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._require_identity('class', p_class);
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
    END IF;
    INSERT INTO fencepost.job_class AS c (class, policy, lease, max_attempts, max_finishes, backoff_base, backoff_max,
        max_effect_timeout, network_bound)
    VALUES (p_class, p_policy, p_lease, p_max_attempts, p_max_finishes, p_backoff_base, p_backoff_max,
        p_max_effect_timeout, p_network_bound)
    ON CONFLICT (class) DO UPDATE SET policy = p_policy, lease = p_lease, max_attempts = p_max_attempts,
        max_finishes = p_max_finishes, backoff_base = p_backoff_base, backoff_max = p_backoff_max,
        max_effect_timeout = p_max_effect_timeout, network_bound = p_network_bound, registered_at = clock_timestamp()
    WHERE (c.policy, c.lease, c.max_attempts, c.max_finishes, c.backoff_base, c.backoff_max, c.max_effect_timeout, c.network_bound)
       IS DISTINCT FROM (p_policy, p_lease, p_max_attempts, p_max_finishes, p_backoff_base, p_backoff_max, p_max_effect_timeout, p_network_bound);
END $$;
