-- What does not proceed by itself, whose it is, how much and since when; what `can resume` needs a release and nothing else.
CREATE OR REPLACE FUNCTION fencepost.holds()
RETURNS TABLE (what text, owner text, tenant text, class text, count bigint, oldest timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT 'disarmed', 'authority admin', NULL::text, NULL::text, 1::bigint, NULL::timestamptz WHERE NOT fencepost.armed()
    UNION ALL
    SELECT 'frozen', 'authority admin', NULL, NULL, 1, NULL FROM fencepost.installation AS i WHERE i.frozen
    UNION ALL
    SELECT 'frozen', 'authority admin', t.tenant, NULL, 1, t.changed_at FROM fencepost.tenant AS t WHERE t.frozen
    UNION ALL
    SELECT CASE r.kind WHEN 'tenant' THEN 'suspended' WHEN 'class' THEN 'disabled' ELSE 'revoked: ' || r.subject END, 'authority admin',
           CASE r.kind WHEN 'tenant' THEN r.subject END, CASE r.kind WHEN 'class' THEN r.subject END, 1, r.since
    FROM fencepost.restriction AS r
    UNION ALL
    -- One for every tenant counts here once no tenant is left that it covers.
    SELECT 'grant of an old epoch: ' || g.principal, 'authority admin', g.tenant, g.class, 1, g.since
    FROM fencepost.principal_grant AS g
    CROSS JOIN fencepost.installation AS i LEFT JOIN fencepost.tenant AS t ON t.tenant = g.tenant
    WHERE g.epoch < greatest(i.floor, t.epoch)
    UNION ALL
    (SELECT CASE WHEN j.exec = 'poison' THEN 'poison'
                 WHEN j.suspect AND NOT coalesce(k.policy = 'strict' AND j.applied_effects > 0, false) THEN 'effects suspect'
                 ELSE 'can resume' END AS what,
            CASE WHEN j.exec = 'poison' THEN 'operator'
                 WHEN j.suspect AND NOT coalesce(k.policy = 'strict' AND j.applied_effects > 0, false)
                 THEN coalesce(k.assignee, 'operator') ELSE 'authority admin' END AS owner,
            j.tenant, j.class, count(*), min(j.changed_at)
     FROM fencepost.job AS j
     CROSS JOIN fencepost.installation AS i LEFT JOIN fencepost.tenant AS t ON t.tenant = j.tenant
     LEFT JOIN fencepost.job_class AS k ON k.class = j.class
     WHERE j.exec IN ('held', 'poison') OR j.exec IN ('queued', 'waiting') AND j.epoch <> greatest(i.floor, t.epoch)
     GROUP BY 1, 2, 3, 4)
    UNION ALL
    SELECT 'owned by ' || l.implementation, l.implementation, j.tenant, l.class, count(*), min(j.changed_at)
    FROM fencepost.lifecycle AS l JOIN fencepost.job AS j ON j.class = l.class AND j.exec IN ('queued', 'waiting')
    GROUP BY l.implementation, j.tenant, l.class
    UNION ALL
    SELECT 'effect unknown', e.assignee, e.tenant, e.class, count(*), min(e.unknown_since)
    FROM fencepost.effect AS e WHERE e.state = 'unknown' GROUP BY e.assignee, e.tenant, e.class
    UNION ALL
    SELECT 'event of an old epoch', 'authority admin', d.tenant, NULL, count(*), min(d.created_at)
    FROM fencepost.dead_letter AS d WHERE d.reason = 'old_epoch' AND d.due_at IS NULL GROUP BY d.tenant
    UNION ALL
    SELECT 'begun, and its job is lost', 'operator', b.tenant, b.class, count(*), min(b.found_at)
    FROM fencepost.lost_begin AS b
    -- Submitted again and known by now, it is an effect like any other.
    WHERE NOT EXISTS (SELECT FROM fencepost.effect AS e
                      WHERE e.tenant = b.tenant AND e.operation = b.operation AND e.effect_key = b.effect_key)
    GROUP BY b.tenant, b.class
$$;

-- The first entry of the history whose hash does not follow from the one before it; null when the whole chain holds.
CREATE OR REPLACE FUNCTION fencepost.verify_authority()
RETURNS bigint LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT min(l.seq) FROM (
        SELECT l.seq, l.hash = fencepost._authority_hash(l.previous, l.seq, l.kind, l.actor, l.detail)
               AND l.previous = coalesce(lag(l.hash) OVER (ORDER BY l.seq), ''::bytea)
               AND l.seq = coalesce(lag(l.seq) OVER (ORDER BY l.seq), 0) + 1 AS holds
        FROM fencepost.authority_log AS l) AS l
    WHERE NOT l.holds
$$;
