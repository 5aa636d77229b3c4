-- Finished jobs: out of the tables that are worked with, into the archive, and out of that when its time is over too.

-- Done, or cancelled and nobody else's, with nothing open or doubtful about it, for longer than that. The caller looks at the
-- effects, in which there may be evidence against a job that is done.
CREATE OR REPLACE FUNCTION fencepost._finished(p_job fencepost.job, p_keep interval)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT p_job.archived_at IS NULL
       AND (p_job.exec = 'done' OR p_job.exec = 'cancelled' AND p_job.reason IS DISTINCT FROM 'transferred')
       AND p_job.open_effects = 0 AND NOT p_job.suspect AND p_job.changed_at < statement_timestamp() - p_keep
$$;

-- The partition of this month, made where it is not there.
-- Locks: the archive, where it is made; waits for those who write to it.
CREATE OR REPLACE FUNCTION fencepost._make_archive()
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_first constant timestamptz := date_trunc('month', now(), 'UTC');
    v_name constant text := 'archive_' || to_char(v_first AT TIME ZONE 'UTC', 'YYYY_MM');
BEGIN
    IF to_regclass('fencepost.' || v_name) IS NULL THEN
        LOCK TABLE fencepost.archive IN SHARE ROW EXCLUSIVE MODE;
        EXECUTE format('CREATE TABLE IF NOT EXISTS fencepost.%I PARTITION OF fencepost.archive FOR VALUES FROM (%L) TO (%L)',
            v_name, v_first, (v_first AT TIME ZONE 'UTC' + interval '1 month') AT TIME ZONE 'UTC');
    END IF;
END $$;

-- Moves finished jobs that are older than their class keeps them into the archive, `p_limit` at most, each whole; killed before
-- its commit it has moved none. The job stays as the identity of its operation, its effects and operators' decisions stay as they are: the same
-- operation is never new, late evidence is taken as ever. Looks at the jobs of a few pages of attempts and holds, from
-- `p_after` (at first 0) on; `after` is where to go on, null at the end.
-- Invariant: whatever is deleted is what is archived, in the same statement; a job is looked at after it is locked.
-- Locks: gate, then jobs and attempts that nobody else holds; waits for nobody but whoever makes the month's partition.
CREATE OR REPLACE FUNCTION fencepost.archive_jobs(p_after bigint, p_limit integer, OUT archived integer, OUT after bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s'
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_end constant bigint := p_after + 64;
    v_from tid;
    v_to tid;
    v_found record;
    v_seen record;
    v_held uuid[];
    v_busy record;
    v_jobs record;
    v_table text;
BEGIN
    IF p_after IS NULL OR p_after NOT BETWEEN 0 AND 4294967000 THEN
        PERFORM fencepost._refuse('ZF003', 'after is not where a call ended', 'after', 'begin with 0');
    ELSIF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'limit is not between 1 and 1000', 'limit', NULL);
    ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM fencepost._refuse('ZF004', 'an older snapshot may not show what came late', 'isolation', 'use a read committed transaction');
    END IF;
    PERFORM fencepost._enter();
    archived := 0;
    v_from := format('(%s,0)', p_after)::tid;
    v_to := format('(%s,0)', v_end)::tid;
    SELECT array_agg(f.tenant) AS tenants, array_agg(f.operation) AS operations, array_agg(f.class) AS classes INTO v_found FROM (
        SELECT s.tenant, s.operation, s.class FROM (
            SELECT a.tenant, a.operation, a.class FROM fencepost.attempt AS a WHERE a.ctid >= v_from AND a.ctid < v_to
            UNION
            SELECT h.tenant, h.operation, h.class FROM fencepost.job_hold AS h
            WHERE h.ctid >= v_from AND h.ctid < v_to AND h.state = 'cancelled'
            ORDER BY 1, 2, 3) AS s
        JOIN fencepost.job_retention AS r ON r.class = s.class
        CROSS JOIN LATERAL (
            SELECT FROM fencepost.job AS k
            WHERE k.tenant = s.tenant AND k.operation = s.operation AND k.class = s.class AND fencepost._finished(k, r.finished_keep)
              AND NOT EXISTS (SELECT FROM fencepost.effect AS e
                              WHERE e.tenant = k.tenant AND e.operation = k.operation AND e.class = k.class
                                AND e.state IN ('pending', 'unknown'))
            FOR NO KEY UPDATE SKIP LOCKED) AS j
        LIMIT p_limit) AS f;
    IF v_found.tenants IS NOT NULL THEN
        -- Every attempt of a job has ended in one of its events or in its completion.
        SELECT array_agg(i.tenant) AS tenants, array_agg(i.attempt) AS attempts INTO v_seen FROM (
            SELECT u.tenant, l.attempt FROM unnest(v_found.tenants, v_found.operations, v_found.classes) AS u (tenant, operation, class)
            CROSS JOIN LATERAL (
                SELECT v.attempt FROM fencepost.job_event AS v
                WHERE v.tenant = u.tenant AND v.operation = u.operation AND v.class = u.class
                UNION ALL
                SELECT s.attempt FROM fencepost.staged AS s
                WHERE s.tenant = u.tenant AND s.operation = u.operation AND s.class = u.class
                UNION ALL
                SELECT k.done_attempt FROM fencepost.job AS k
                WHERE k.tenant = u.tenant AND k.operation = u.operation AND k.class = u.class) AS l
            WHERE l.attempt IS NOT NULL
            GROUP BY 1, 2) AS i;
        -- Who stages a result holds the attempt; that job is left for the next time.
        SELECT coalesce(array_agg(l.attempt), '{}') INTO v_held
        FROM unnest(v_seen.tenants, v_seen.attempts) AS i (tenant, attempt)
        CROSS JOIN LATERAL (
            SELECT a.attempt FROM fencepost.attempt AS a
            WHERE a.tenant = i.tenant AND a.attempt = i.attempt FOR UPDATE SKIP LOCKED) AS l;
        SELECT coalesce(array_agg(l.tenant), '{}') AS tenants, array_agg(l.operation) AS operations, array_agg(l.class) AS classes
        INTO v_busy FROM unnest(v_seen.tenants, v_seen.attempts) AS i (tenant, attempt)
        CROSS JOIN LATERAL (
            SELECT a.tenant, a.operation, a.class FROM fencepost.attempt AS a
            WHERE a.tenant = i.tenant AND a.attempt = i.attempt OFFSET 0) AS l
        WHERE i.attempt <> ALL (v_held);
        SELECT array_agg(u.tenant) AS tenants, array_agg(u.operation) AS operations, array_agg(u.class) AS classes INTO v_jobs
        FROM unnest(v_found.tenants, v_found.operations, v_found.classes) AS u (tenant, operation, class)
        JOIN fencepost.job_retention AS r ON r.class = u.class
        CROSS JOIN LATERAL (
            SELECT FROM fencepost.job AS k
            WHERE k.tenant = u.tenant AND k.operation = u.operation AND k.class = u.class AND fencepost._finished(k, r.finished_keep)
            OFFSET 0) AS j
        WHERE NOT EXISTS (SELECT FROM fencepost.effect AS e
                          WHERE e.tenant = u.tenant AND e.operation = u.operation AND e.class = u.class
                            AND e.state IN ('pending', 'unknown'))
          AND (u.tenant, u.operation, u.class) NOT IN (
              SELECT b.tenant, b.operation, b.class
              FROM unnest(v_busy.tenants, v_busy.operations, v_busy.classes) AS b (tenant, operation, class));
        IF v_jobs.tenants IS NOT NULL THEN
            archived := cardinality(v_jobs.tenants);
            PERFORM fencepost._make_archive();
            -- Tells append_only that rows may go; archived_only looks at each of them, whoever says so.
            PERFORM set_config('fencepost.archiving', pg_current_xact_id()::text, true);
            INSERT INTO fencepost.archive (archived_at, tenant, operation, class, kind, content)
            SELECT now(), j.tenant, j.operation, j.class, 'job', to_jsonb(j)
            FROM unnest(v_jobs.tenants, v_jobs.operations, v_jobs.classes) AS u (tenant, operation, class)
            JOIN fencepost.job AS j ON j.tenant = u.tenant AND j.operation = u.operation AND j.class = u.class;
            -- What is staged refers to its attempt, so it goes first.
            FOREACH v_table IN ARRAY ARRAY['staged', 'publication', 'job_event', 'signal', 'wait', 'progress', 'result'] LOOP
                EXECUTE format($move$
                    WITH gone AS (
                        DELETE FROM fencepost.%1$I AS g USING unnest($1, $2, $3) AS u (tenant, operation, class)
                        WHERE g.tenant = u.tenant AND g.operation = u.operation AND g.class = u.class RETURNING g.*)
                    INSERT INTO fencepost.archive (archived_at, tenant, operation, class, kind, content)
                    SELECT now(), g.tenant, g.operation, g.class, %1$L, to_jsonb(g) FROM gone AS g $move$, v_table)
                USING v_jobs.tenants, v_jobs.operations, v_jobs.classes;
            END LOOP;
            WITH gone AS (
                DELETE FROM fencepost.attempt AS a USING unnest(v_seen.tenants, v_seen.attempts) AS i (tenant, attempt)
                WHERE a.tenant = i.tenant AND a.attempt = i.attempt
                  AND (a.tenant, a.operation, a.class) IN (
                      SELECT u.tenant, u.operation, u.class
                      FROM unnest(v_jobs.tenants, v_jobs.operations, v_jobs.classes) AS u (tenant, operation, class))
                RETURNING a.*)
            INSERT INTO fencepost.archive (archived_at, tenant, operation, class, kind, content)
            SELECT now(), g.tenant, g.operation, g.class, 'attempt', to_jsonb(g) FROM gone AS g;
            DELETE FROM fencepost.job_hold AS h USING unnest(v_jobs.tenants, v_jobs.operations, v_jobs.classes) AS u (tenant, operation, class)
            WHERE h.tenant = u.tenant AND h.operation = u.operation AND h.class = u.class;
            UPDATE fencepost.job AS j SET args = '', archived_at = now()
            FROM unnest(v_jobs.tenants, v_jobs.operations, v_jobs.classes) AS u (tenant, operation, class)
            WHERE j.tenant = u.tenant AND j.operation = u.operation AND j.class = u.class;
        END IF;
    END IF;
    -- As many as were asked for: there may be more of them here.
    after := CASE WHEN archived = p_limit THEN p_after ELSE v_end END;
    IF after * current_setting('block_size')::bigint
       >= greatest(pg_relation_size('fencepost.attempt'), pg_relation_size('fencepost.job_hold')) THEN
        after := NULL;
        UPDATE fencepost.job_retention SET passed_at = clock_timestamp();
    END IF;
END $$;

-- What `archive_jobs` would move now, by class, as far as it is worth counting.
CREATE OR REPLACE FUNCTION fencepost.finished_jobs(p_most integer)
RETURNS TABLE (class text, finished_keep interval, jobs bigint, oldest timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT r.class, r.finished_keep, count(f.at), min(f.at) FROM fencepost.job_retention AS r
    LEFT JOIN LATERAL (
        SELECT k.changed_at AS at FROM (
            SELECT a.tenant, a.operation FROM fencepost.attempt AS a WHERE a.class = r.class
            UNION
            SELECT h.tenant, h.operation FROM fencepost.job_hold AS h WHERE h.class = r.class AND h.state = 'cancelled') AS s
        JOIN fencepost.job AS k ON k.tenant = s.tenant AND k.operation = s.operation AND k.class = r.class
        WHERE fencepost._finished(k, r.finished_keep)
          AND NOT EXISTS (SELECT FROM fencepost.effect AS e
                          WHERE e.tenant = k.tenant AND e.operation = k.operation AND e.class = k.class
                            AND e.state IN ('pending', 'unknown'))
        LIMIT p_most) AS f ON true
    GROUP BY r.class ORDER BY r.class
$$;

-- Drops the months of the archive that have been over for longer than it keeps them; returns their names. With `p_dry` only that.
-- Locks: gate, then the archive; waits two seconds at most for those who write to it or read it.
CREATE OR REPLACE FUNCTION fencepost.drop_archives(p_dry boolean)
RETURNS SETOF text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' AS $$
DECLARE
    v_name text;
BEGIN
    PERFORM fencepost._enter();
    FOR v_name IN
        SELECT c.relname FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid CROSS JOIN fencepost.archive_retention AS r
        WHERE i.inhparent = 'fencepost.archive'::regclass AND c.relname ~ '^archive_\d{4}_\d\d$'
          AND (to_date(substr(c.relname, 9), 'YYYY_MM') + interval '1 month') AT TIME ZONE 'UTC' < clock_timestamp() - r.archive_keep
        ORDER BY c.relname
    LOOP
        IF NOT p_dry THEN
            EXECUTE format('DROP TABLE fencepost.%I', v_name);
        END IF;
        RETURN NEXT v_name;
    END LOOP;
END $$;

-- Declares how long finished jobs of a class stay as they are; null: for ever.
CREATE OR REPLACE FUNCTION fencepost.set_job_retention(p_class text, p_keep interval, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    IF p_keep NOT BETWEEN interval '1 hour' AND interval '100 years' THEN
        PERFORM fencepost._refuse('ZF003', 'finished jobs stay between an hour and a hundred years', 'finished_keep', 'or for ever');
    ELSIF NOT EXISTS (SELECT FROM fencepost.job_class AS k WHERE k.class = p_class) THEN
        PERFORM fencepost._refuse('ZF051', 'this class is not registered', 'class', 'see: fencepost jobs queues');
    END IF;
    IF p_keep IS NULL THEN
        DELETE FROM fencepost.job_retention AS r WHERE r.class = p_class;
    ELSE
        INSERT INTO fencepost.job_retention AS r (class, finished_keep) VALUES (p_class, p_keep)
        ON CONFLICT (class) DO UPDATE SET finished_keep = p_keep, changed_at = clock_timestamp();
    END IF;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
    VALUES (gen_random_uuid(), 'retention', p_actor, p_reason, 'finished ' || p_class, coalesce(p_keep::text, 'for ever'));
END $$;

-- Declares how long the archive keeps what it was given; null: for ever.
CREATE OR REPLACE FUNCTION fencepost.set_archive_retention(p_keep interval, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    IF p_keep NOT BETWEEN interval '1 day' AND interval '100 years' THEN
        PERFORM fencepost._refuse('ZF003', 'the archive keeps between a day and a hundred years', 'archive_keep', 'or for ever');
    END IF;
    IF p_keep IS NULL THEN
        DELETE FROM fencepost.archive_retention;
    ELSE
        INSERT INTO fencepost.archive_retention AS r (archive_keep) VALUES (p_keep)
        ON CONFLICT (singleton) DO UPDATE SET archive_keep = p_keep, changed_at = clock_timestamp();
    END IF;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
    VALUES (gen_random_uuid(), 'retention', p_actor, p_reason, 'archive of jobs', coalesce(p_keep::text, 'for ever'));
END $$;

-- Invariant: history leaves for the archive only, and only what is there word for word.
CREATE OR REPLACE FUNCTION fencepost._archived_only()
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM gone AS g
               WHERE NOT EXISTS (SELECT FROM fencepost.archive AS a
                                 WHERE a.archived_at = now() AND a.tenant = g.tenant AND a.operation = g.operation
                                   AND a.class = g.class AND a.kind = TG_TABLE_NAME AND a.content = to_jsonb(g))) THEN
        PERFORM fencepost._refuse('ZF003', TG_TABLE_NAME || ' is append-only', TG_TABLE_NAME, 'history is never changed');
    END IF;
    RETURN NULL;
END $$;
-- Locks: none where the triggers exist.
DO $$
DECLARE
    v_table text;
BEGIN
    FOREACH v_table IN ARRAY ARRAY['attempt', 'staged', 'publication', 'signal', 'result', 'job_event'] LOOP
        IF NOT EXISTS (SELECT FROM pg_trigger
                       WHERE tgrelid = format('fencepost.%I', v_table)::regclass AND tgname = 'archived_only') THEN
            EXECUTE format('CREATE TRIGGER archived_only AFTER DELETE ON fencepost.%I REFERENCING OLD TABLE AS gone '
                           'FOR EACH STATEMENT EXECUTE FUNCTION fencepost._archived_only()', v_table);
        END IF;
    END LOOP;
END $$;

-- What the archive has of jobs, without what they were given, computed, were told and returned.
CREATE OR REPLACE VIEW fencepost.archived AS
    SELECT a.tenant, a.operation, a.class, a.archived_at, a.kind, a.content - '{args,result,payload}'::text[] AS content
    FROM fencepost.archive AS a;
