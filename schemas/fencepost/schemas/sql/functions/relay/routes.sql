-- Whether events of this type take a route: an exact type, a prefix that ends in `.*`, or `*`.
CREATE OR REPLACE FUNCTION fencepost._matches(p_match text, p_type text)
RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT p_match = '*' OR p_match = p_type OR (p_match LIKE '%.*' AND starts_with(p_type, left(p_match, -1)))
$$;

-- From this number on a destination answers for these matches and no others; what came before stays its business.
-- Locks: no tick is taken while routes change, so whoever reads the routes after a page's end tick knows every change
-- that concerns a row of that page.
CREATE OR REPLACE FUNCTION fencepost._span_routes(p_destination text, p_matches text[], p_early boolean)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_bound bigint := 0;
BEGIN
    LOCK TABLE fencepost.tick_gate IN EXCLUSIVE MODE;
    IF NOT p_early THEN
        SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END INTO v_bound FROM fencepost.outbox_seq AS s;
    END IF;
    DELETE FROM fencepost.route AS r
    WHERE r.destination = p_destination AND r.until IS NULL AND r.since = v_bound AND r.match <> ALL (p_matches);
    UPDATE fencepost.route AS r SET until = v_bound
    WHERE r.destination = p_destination AND r.until IS NULL AND r.match <> ALL (p_matches);
    INSERT INTO fencepost.route (destination, match, since)
    SELECT DISTINCT p_destination, m, v_bound FROM unnest(p_matches) AS m
    WHERE NOT EXISTS (SELECT FROM fencepost.route AS r
                      WHERE r.destination = p_destination AND r.match = m AND r.until IS NULL);
END $$;

-- How many committed events of a destination are its business and not acked; counting stops at the limit.
CREATE OR REPLACE FUNCTION fencepost._unsent(p_destination text, p_limit bigint)
RETURNS bigint LANGUAGE sql AS $$
    SELECT count(*) FROM (
        SELECT FROM fencepost.slot AS s
        JOIN fencepost.destination AS d ON d.destination = s.destination
        LEFT JOIN LATERAL (SELECT k.era, k.acked_tick, k.end_tick, k.position FROM fencepost.ack AS k
                           WHERE k.destination = s.destination AND k.slot = s.slot ORDER BY k.n DESC LIMIT 1) AS a ON true
        JOIN fencepost.tick AS t ON t.era = coalesce(a.era, d.start_era) AND t.n = coalesce(a.acked_tick, d.start_tick)
        JOIN fencepost.tick AS e ON e.era = coalesce(a.era, d.start_era) AND e.n = coalesce(a.end_tick, d.start_tick)
        CROSS JOIN LATERAL (
            SELECT m.seq, m.type, m.xid FROM fencepost.outbox AS m WHERE m.slot = s.slot AND m.seq > t.hint
            UNION ALL
            SELECT l.seq, l.type, l.xid FROM fencepost.outbox AS l
            WHERE l.slot = s.slot AND l.seq <= t.hint
              AND (l.xid = ANY (t.snap_xip) OR l.xid >= t.snap_xmax AND l.xid < t.next)) AS o
        WHERE s.destination = p_destination
          AND NOT (o.seq <= coalesce(a.position, 0) AND pg_visible_in_snapshot(o.xid, e.snap))
          AND EXISTS (SELECT FROM fencepost.route AS r
                      WHERE r.destination = p_destination AND fencepost._matches(r.match, o.type)
                        AND o.seq > r.since AND (r.until IS NULL OR o.seq <= r.until))
        LIMIT p_limit) AS w
$$;
