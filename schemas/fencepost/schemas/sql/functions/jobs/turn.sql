-- Locks due jobs of a class that has a limit or is fair, no more than its limits leave room for: from the most urgent
-- priority on, and within it the tenants in turn, each no more than its part of what is still to be had. Takes nothing
-- while another transaction claims jobs of this class: who runs would not be known. Locked, then looked at.
-- `p_taken`: tenants of what this claim has of the class already. `served`: who was served last at each priority, for the
-- next time; null where there is nothing to note.
CREATE OR REPLACE FUNCTION fencepost._take_turn(
    p_class text, p_priorities integer[], p_marks timestamptz[], p_now timestamptz, p_floor bigint, p_limit integer, p_but tid[],
    p_taken text[], INOUT served jsonb, OUT at tid[], OUT jobs tid[], OUT tenants text[], OUT operations text[])
LANGUAGE plpgsql AS $$
DECLARE
    v_class fencepost.job_class;
    v_turn fencepost.turn;
    v_running text[] := p_taken;
    v_left integer := p_limit;
    v_took record;
    v_next record;
    v_served jsonb;
    v_without text[];
    v_after text;
BEGIN
    at := '{}';
    SELECT k.* INTO v_class FROM fencepost.job_class AS k WHERE k.class = p_class FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT t.* INTO v_turn FROM fencepost.turn AS t WHERE t.class = p_class ORDER BY t.n DESC LIMIT 1;
    IF v_class.job_limit IS NOT NULL THEN
        v_running := v_running || ARRAY(
            SELECT h.tenant FROM unnest(v_turn.tenants, v_turn.operations, v_turn.generations) AS h (tenant, operation, generation)
            CROSS JOIN LATERAL (
                SELECT k.exec, k.generation FROM fencepost.job AS k
                WHERE k.tenant = h.tenant AND k.operation = h.operation AND k.class = p_class OFFSET 0) AS j
            WHERE j.exec = 'running' AND j.generation = h.generation);
        v_left := least(v_left, v_class.job_limit - cardinality(v_running));
    END IF;
    IF v_left <= 0 THEN
        served := NULL;
        RETURN;
    ELSIF NOT v_class.fair THEN
        SELECT coalesce(array_agg(t.at), '{}'), array_agg(t.job) INTO at, jobs
        FROM fencepost._take(p_class, p_priorities, p_marks, p_now, p_floor, v_left, p_but) AS t;
        SELECT array_agg(j.tenant), array_agg(j.operation) INTO tenants, operations FROM fencepost.job AS j WHERE j.ctid = ANY (jobs);
        served := CASE WHEN at <> '{}' THEN coalesce(served, v_turn.served, '{}') END;
        RETURN;
    END IF;
    v_served := coalesce(served, v_turn.served, '{}');
    served := NULL;
    FOR v_priority IN 1 .. cardinality(p_priorities) LOOP
        v_after := coalesce(v_served ->> p_priorities[v_priority]::text, '');
        v_without := '{}';
        WHILE v_left > 0 LOOP
            SELECT n.* INTO v_next FROM fencepost._next_tenants(p_class, p_priorities[v_priority], p_marks[v_priority], p_now,
                v_after, v_left, v_without || ARRAY(
                    SELECT r.tenant FROM unnest(v_running) AS r (tenant) GROUP BY r.tenant
                    HAVING count(*) >= v_class.tenant_limit)) AS n;
            v_after := coalesce(v_next.reached, v_after);
            EXIT WHEN v_next.tenants = '{}';
            SELECT coalesce(array_agg(d.at), '{}') AS at, array_agg(d.job) AS jobs, array_agg(d.tenant) AS tenants,
                   array_agg(d.operation) AS operations
            INTO v_took FROM (
                SELECT d.at, d.job, d.tenant, d.operation
                FROM unnest(v_next.tenants) WITH ORDINALITY AS u (tenant, n)
                CROSS JOIN LATERAL (
                    SELECT p.at, j.at AS job, p.tenant, p.operation FROM (
                        SELECT a.ctid AS at, a.tenant, a.operation, a.generation, a.epoch FROM fencepost.agenda AS a
                        WHERE a.fair_class = p_class AND a.priority = p_priorities[v_priority] AND a.tenant = u.tenant
                          AND a.due >= p_marks[v_priority] AND a.due <= p_now AND a.ctid <> ALL (p_but || at)
                          AND a.epoch = greatest(p_floor, (SELECT t.claimable FROM fencepost.tenant AS t WHERE t.tenant = a.tenant))
                        ORDER BY a.due) AS p
                    CROSS JOIN LATERAL (
                        SELECT k.ctid AS at FROM fencepost.job AS k
                        WHERE k.tenant = p.tenant AND k.operation = p.operation AND k.class = p_class
                          AND k.exec = 'queued' AND k.generation = p.generation AND k.priority = p_priorities[v_priority]
                          AND k.run_at <= p_now AND k.open_effects = 0 AND k.epoch = p.epoch
                        FOR NO KEY UPDATE SKIP LOCKED) AS j
                    LIMIT least(v_left / cardinality(v_next.tenants), v_class.tenant_limit
                                - (SELECT count(*) FROM unnest(v_running) AS r (tenant) WHERE r.tenant = u.tenant))) AS d
                LIMIT v_left) AS d;
            -- Who had less than its part has no more at this priority.
            v_without := v_without || ARRAY(
                SELECT u.tenant FROM unnest(v_next.tenants) AS u (tenant)
                WHERE (SELECT count(*) FROM unnest(v_took.tenants) AS d (tenant) WHERE d.tenant = u.tenant)
                      < v_left / cardinality(v_next.tenants));
            at := at || v_took.at;
            jobs := jobs || v_took.jobs;
            tenants := tenants || v_took.tenants;
            operations := operations || v_took.operations;
            v_running := v_running || v_took.tenants;
            v_left := v_left - cardinality(v_took.at);
        END LOOP;
        IF v_after <> coalesce(v_served ->> p_priorities[v_priority]::text, '') OR at <> '{}' THEN
            v_served := v_served || jsonb_build_object(p_priorities[v_priority], v_after);
            served := v_served;
        END IF;
        EXIT WHEN v_left = 0;
        PERFORM fencepost._forget_pointers(p_class, p_priorities[v_priority], p_marks[v_priority], p_now);
    END LOOP;
END $$;

-- Up to so many tenants with due jobs of a class and priority, in turn: those behind `p_after`, then from the first on.
-- Looks at each tenant once, and at a thousand at most: others may have work for later only. `reached`: where to go on.
CREATE OR REPLACE FUNCTION fencepost._next_tenants(
    p_class text, p_priority integer, p_mark timestamptz, p_now timestamptz, p_after text, p_limit integer, p_without text[],
    OUT tenants text[], OUT reached text) LANGUAGE sql AS $$
    WITH RECURSIVE walk (tenant, due, lap, n) AS (
        SELECT p_after, NULL::timestamptz, 0, 0
        UNION ALL
        SELECT f.tenant, f.due, f.lap, w.n + 1 FROM walk AS w CROSS JOIN LATERAL (
            (SELECT a.tenant, a.due, w.lap AS lap FROM fencepost.agenda AS a
             WHERE a.fair_class = p_class AND a.priority = p_priority AND a.tenant > w.tenant AND a.due >= p_mark
               AND (w.lap = 0 OR a.tenant <= p_after)
             ORDER BY a.tenant, a.due LIMIT 1)
            UNION ALL
            (SELECT '', NULL, 1 WHERE w.lap = 0)
            LIMIT 1) AS f
        WHERE w.n < 1000
    ), found AS MATERIALIZED (
        SELECT w.tenant, w.n FROM walk AS w WHERE w.due <= p_now AND w.tenant <> ALL (p_without) LIMIT p_limit
    )
    SELECT coalesce(array_agg(f.tenant ORDER BY f.n), '{}'),
           coalesce((array_agg(f.tenant ORDER BY f.n DESC))[1], (SELECT w.tenant FROM walk AS w WHERE w.n = 1000))
    FROM found AS f
$$;

-- Puts the row of a class in the place of the one before: who of it still runs, who runs now, and who was served last.
CREATE OR REPLACE FUNCTION fencepost._note_turn(p_class text, p_served jsonb, p_tenants text[], p_operations text[])
RETURNS void LANGUAGE sql AS $$
    WITH before AS (
        DELETE FROM fencepost.turn AS t WHERE t.class = p_class
          AND t.n = (SELECT u.n FROM fencepost.turn AS u WHERE u.class = p_class ORDER BY u.n DESC LIMIT 1)
        RETURNING t.*
    ), holder AS (
        SELECT j.tenant, j.operation, j.generation FROM before AS b
        CROSS JOIN LATERAL unnest(b.tenants, b.operations, b.generations) AS h (tenant, operation, generation)
        CROSS JOIN LATERAL (
            SELECT k.tenant, k.operation, k.exec, k.generation FROM fencepost.job AS k
            WHERE k.tenant = h.tenant AND k.operation = h.operation AND k.class = p_class OFFSET 0) AS j
        WHERE j.exec = 'running' AND j.generation = h.generation
        UNION
        SELECT j.tenant, j.operation, j.generation FROM unnest(p_tenants, p_operations) AS h (tenant, operation)
        CROSS JOIN LATERAL (
            SELECT k.tenant, k.operation, k.exec, k.generation FROM fencepost.job AS k
            WHERE k.tenant = h.tenant AND k.operation = h.operation AND k.class = p_class OFFSET 0) AS j
        WHERE j.exec = 'running'
    )
    INSERT INTO fencepost.turn (class, n, served, tenants, operations, generations)
    SELECT p_class, coalesce((SELECT b.n FROM before AS b), 0) + 1,
           -- Whose turn it was is forgotten where there are priorities without end.
           CASE WHEN octet_length(p_served::text) > 100000 THEN '{}'
                ELSE coalesce(p_served, (SELECT b.served FROM before AS b), '{}') END, coalesce(array_agg(h.tenant), '{}'),
           coalesce(array_agg(h.operation), '{}'), coalesce(array_agg(h.generation), '{}')
    FROM holder AS h WHERE (SELECT k.job_limit FROM fencepost.job_class AS k WHERE k.class = p_class) IS NOT NULL
$$;
