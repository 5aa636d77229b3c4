-- Stops a queue, or a class, from being claimed; what runs goes on, and may renew, publish and end as ever.
-- Returns paused, or already_paused (by whom and why stays as it is).
-- Locks: waits for the claims that are under way, so that after its commit nothing more starts.
CREATE OR REPLACE FUNCTION fencepost.pause(p_scope text, p_name text, p_actor text, p_reason text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_scope(p_scope, p_name, p_actor, p_reason);
    IF p_scope = 'class' AND NOT EXISTS (SELECT FROM fencepost.job_class AS k WHERE k.class = p_name) THEN
        PERFORM fencepost._refuse('ZF051', 'this class is not registered', 'class', 'see: fencepost jobs queues');
    ELSIF p_scope = 'queue' AND NOT EXISTS (SELECT FROM fencepost.job_class AS k WHERE k.queue = p_name) THEN
        PERFORM fencepost._refuse('ZF003', 'no registered class is in this queue', 'queue', 'see: fencepost jobs queues');
    END IF;
    PERFORM set_config('synchronous_commit', 'on', true);
    LOCK TABLE fencepost.paused IN EXCLUSIVE MODE;
    INSERT INTO fencepost.paused (scope, name, actor, reason) VALUES (p_scope, p_name, p_actor, p_reason)
    ON CONFLICT (scope, name) DO NOTHING;
    IF NOT FOUND THEN
        RETURN 'already_paused';
    END IF;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
    VALUES (gen_random_uuid(), 'pause', p_actor, p_reason, p_scope || ' ' || p_name, 'paused');
    RETURN 'paused';
END $$;

-- Lets a paused queue or class be claimed again. Returns resumed, or not_paused.
CREATE OR REPLACE FUNCTION fencepost.resume(p_scope text, p_name text, p_actor text, p_reason text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_scope(p_scope, p_name, p_actor, p_reason);
    PERFORM set_config('synchronous_commit', 'on', true);
    DELETE FROM fencepost.paused AS h WHERE h.scope = p_scope AND h.name = p_name;
    IF NOT FOUND THEN
        RETURN 'not_paused';
    END IF;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
    VALUES (gen_random_uuid(), 'resume', p_actor, p_reason, p_scope || ' ' || p_name, 'resumed');
    RETURN 'resumed';
END $$;

-- Refuses what names neither a queue nor a class, or not who decides and why.
CREATE OR REPLACE FUNCTION fencepost._require_scope(p_scope text, p_name text, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fencepost._require_login();
    IF p_scope IS NULL OR p_scope NOT IN ('queue', 'class') THEN
        PERFORM fencepost._refuse('ZF003', 'scope is neither queue nor class', 'scope', NULL);
    END IF;
    PERFORM fencepost._require_identity(p_scope, p_name);
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
END $$;

-- Each class with its queue and limits, how many run (where there is a limit), how many tenants are at theirs, and what
-- keeps it from being claimed: open, paused (its queue or itself), at_limit.
CREATE OR REPLACE VIEW fencepost.queues AS
    SELECT k.queue, k.class, k.job_limit, k.tenant_limit, k.fair, CASE WHEN k.job_limit IS NOT NULL THEN r.running END AS running,
           CASE WHEN k.tenant_limit IS NOT NULL THEN r.tenants_at_limit END AS tenants_at_limit,
           CASE WHEN h.scope IS NOT NULL THEN 'paused' WHEN r.running >= k.job_limit THEN 'at_limit' ELSE 'open' END AS state,
           h.scope AS paused, h.actor, h.reason, h.paused_at
    FROM fencepost.job_class AS k
    LEFT JOIN LATERAL (
        SELECT p.* FROM fencepost.paused AS p WHERE (p.scope, p.name) IN (('class', k.class), ('queue', k.queue))
        ORDER BY p.scope DESC LIMIT 1) AS h ON true
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(t.running), 0)::bigint AS running,
               count(*) FILTER (WHERE t.running >= k.tenant_limit) AS tenants_at_limit
        FROM (
            SELECT j.tenant, count(*) AS running
            FROM (SELECT u.* FROM fencepost.turn AS u WHERE u.class = k.class ORDER BY u.n DESC LIMIT 1) AS u
            CROSS JOIN LATERAL unnest(u.tenants, u.operations, u.generations) AS o (tenant, operation, generation)
            JOIN fencepost.job AS j ON j.tenant = o.tenant AND j.operation = o.operation AND j.class = k.class
            WHERE j.exec = 'running' AND j.generation = o.generation
            GROUP BY j.tenant) AS t) AS r;
