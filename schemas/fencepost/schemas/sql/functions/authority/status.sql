-- What is in every state, by tenant and class or type: count, oldest age and attempts, with typed reasons; no payloads.
CREATE OR REPLACE VIEW fencepost.status AS
    -- Queued work of an older epoch is held by comparison.
    SELECT 'job'::text AS axis, CASE WHEN h.old THEN 'held' ELSE j.exec END AS state, j.tenant, j.class AS kind,
           CASE WHEN h.old THEN 'old_epoch' ELSE coalesce(j.reason, '') END AS reason, count(*) AS count,
           min(CASE j.exec WHEN 'queued' THEN j.submitted_at ELSE j.changed_at END) AS oldest, max(j.attempts) AS attempts
    FROM fencepost.job AS j
    CROSS JOIN fencepost.installation AS i LEFT JOIN fencepost.tenant AS t ON t.tenant = j.tenant
    CROSS JOIN LATERAL (SELECT j.exec IN ('queued', 'waiting') AND j.epoch <> greatest(i.floor, t.epoch) AS old) AS h
    GROUP BY 1, 2, 3, 4, 5
    UNION ALL
    SELECT 'effect', e.state, e.tenant, e.class, coalesce(e.reason, ''), count(*), min(e.changed_at), max(e.begins)
    FROM fencepost.effect AS e GROUP BY 1, 2, 3, 4, 5
    UNION ALL
    SELECT 'event', 'parked', p.tenant, p.type, p.reason, count(*), min(p.parked_at), max(p.attempts)
    FROM fencepost.parked AS p GROUP BY 1, 2, 3, 4, 5
    UNION ALL
    SELECT 'event', 'overtaken', g.tenant, g.type, g.destination, count(*), min(g.at), 0
    FROM fencepost.overtaken AS g
    WHERE g.at >= clock_timestamp() - (SELECT i.replay_window FROM fencepost.installation AS i)
    GROUP BY 1, 2, 3, 4, 5
    UNION ALL
    SELECT 'delivery', 'dead_letter', coalesce(d.tenant, ''), d.consumer, d.reason, count(*), min(d.created_at), max(d.attempts)
    FROM fencepost.dead_letter AS d GROUP BY 1, 2, 3, 4, 5
    UNION ALL
    SELECT 'reservation', 'reserved', r.tenant, r.consumer, '', count(*), min(r.reserved_at), 0
    FROM fencepost.reservation AS r GROUP BY 1, 2, 3, 4, 5
    UNION ALL
    SELECT h.scope, 'paused', '', h.name, '', 1, h.paused_at, 0 FROM fencepost.paused AS h
    UNION ALL
    SELECT 'class', 'at_limit', '', k.class, '', count(*), min(j.changed_at), 0
    FROM fencepost.job_class AS k
    CROSS JOIN LATERAL (SELECT u.* FROM fencepost.turn AS u WHERE u.class = k.class ORDER BY u.n DESC LIMIT 1) AS t
    CROSS JOIN LATERAL unnest(t.tenants, t.operations, t.generations) AS o (tenant, operation, generation)
    JOIN fencepost.job AS j ON j.tenant = o.tenant AND j.operation = o.operation AND j.class = k.class
    WHERE k.job_limit IS NOT NULL AND j.exec = 'running' AND j.generation = o.generation
    GROUP BY k.class, k.job_limit HAVING count(*) >= k.job_limit;
