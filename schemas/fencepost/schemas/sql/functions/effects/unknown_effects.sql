-- Unknown effects by class and severity: how many, since when, and how many nobody escalated although it is long due. No tenants,
-- no keys: what may be shown to anybody who watches.
CREATE OR REPLACE VIEW fencepost.unknown_effects AS
    SELECT e.class, e.severity, count(*) AS count, min(e.unknown_since) AS oldest,
           count(*) FILTER (WHERE e.unknown_since + c.escalate_after[e.escalations + 1] < clock_timestamp() - interval '10 minutes') AS overdue
    FROM fencepost.effect AS e JOIN fencepost.job_class AS c ON c.class = e.class
    WHERE e.state = 'unknown' GROUP BY e.class, e.severity;
