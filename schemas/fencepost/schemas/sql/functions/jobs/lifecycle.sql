-- Refuses (ZF060) unless this implementation owns the lifecycle of each of these classes. The gate is held: nobody is given a
-- class before whoever relies upon this has committed.
CREATE OR REPLACE FUNCTION fencepost._require_owner(p_classes text[], p_implementation text)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_class text;
    v_owner text;
BEGIN
    SELECT u.class, coalesce(l.implementation, 'fencepost') INTO v_class, v_owner
    FROM unnest(p_classes) AS u (class) LEFT JOIN fencepost.lifecycle AS l ON l.class = u.class
    WHERE coalesce(l.implementation, 'fencepost') IS DISTINCT FROM p_implementation ORDER BY u.class LIMIT 1;
    IF FOUND THEN
        PERFORM fencepost._refuse('ZF060', format('the class %s belongs to %s', v_class, v_owner), 'class',
            'stop claiming it; an authority admin may hand it over: fencepost jobs owner');
    END IF;
END $$;

-- For another implementation: from here to the end of the caller's transaction it owns the lifecycle of this class, or the
-- call is refused. Take it in every transaction that claims, retries, reaps or completes.
-- Locks: gate.
CREATE OR REPLACE FUNCTION fencepost.own(p_class text, p_implementation text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_identity('implementation', p_implementation);
    PERFORM fencepost._enter();
    PERFORM fencepost._require_owner(ARRAY[p_class], p_implementation);
END $$;

-- Gives the lifecycle of a class to another implementation, or back to fencepost; returns whose it was. Refused while its jobs
-- run or an effect of them is open; from another implementation, whose work nobody here can see, only with evidence that it
-- has stopped. Jobs that are queued or waiting stay where they are, and whoever owns the class may take them over.
-- Locks: gate EXCLUSIVE: waits at most five seconds for the claims and the `own` that are under way.
CREATE OR REPLACE FUNCTION fencepost.hand_over(
    p_class text, p_implementation text, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_was text;
BEGIN
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_identity('implementation', p_implementation);
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._change(p_version);
    IF NOT EXISTS (SELECT FROM fencepost.job_class AS k WHERE k.class = p_class) THEN
        PERFORM fencepost._refuse('ZF051', 'this class is not registered', 'class', 'see: fencepost jobs queues');
    END IF;
    SELECT l.implementation INTO v_was FROM fencepost.lifecycle AS l WHERE l.class = p_class;
    v_was := coalesce(v_was, 'fencepost');
    IF v_was = p_implementation THEN
        RETURN v_was;
    ELSIF v_was <> 'fencepost' AND coalesce(p_evidence, '') = '' THEN
        PERFORM fencepost._refuse('ZF037', 'there is no evidence that ' || v_was || ' has stopped', 'evidence',
            'stop it, let it give back what it took over, and say where that can be seen');
    ELSIF EXISTS (SELECT FROM fencepost.agenda AS a
                  JOIN fencepost.job AS j ON j.tenant = a.tenant AND j.operation = a.operation AND j.class = a.class
                  WHERE a.class = p_class AND a.priority = 2147483647 AND j.exec = 'running') THEN
        PERFORM fencepost._refuse('ZF060', 'jobs of this class are running', 'running',
            'drain it first: fencepost jobs pause --class, then wait until they have ended');
    ELSIF EXISTS (SELECT FROM fencepost.effect AS e WHERE e.class = p_class AND e.state IN ('pending', 'unknown')) THEN
        PERFORM fencepost._refuse('ZF030', 'an effect of this class is pending or unknown', 'effect', 'reconcile it first');
    END IF;
    DELETE FROM fencepost.lifecycle AS l WHERE l.class = p_class;
    IF p_implementation <> 'fencepost' THEN
        INSERT INTO fencepost.lifecycle (class, implementation) VALUES (p_class, p_implementation);
    END IF;
    PERFORM fencepost._outdate();
    PERFORM fencepost._log_authority('handed_over', jsonb_build_object('class', p_class, 'from', v_was, 'to', p_implementation,
        'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
    RETURN v_was;
END $$;

-- For the owner of a class that is not fencepost: takes up to so many queued jobs out of here, in the transaction that puts
-- them into its own store. From its commit on they are there and nowhere else. What has begun an effect, or may have, stays.
-- Locks: gate, then job rows that nobody else holds.
CREATE OR REPLACE FUNCTION fencepost.take_over(p_class text, p_implementation text, p_limit integer)
RETURNS TABLE (tenant text, operation text, args bytea, source_event uuid, priority integer, run_at timestamptz, attempts integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count bigint;
BEGIN
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'limit is not between 1 and 1000', 'limit', NULL);
    ELSIF p_implementation = 'fencepost' THEN
        PERFORM fencepost._refuse('ZF003', 'fencepost claims its jobs', 'implementation', NULL);
    END IF;
    PERFORM fencepost.own(p_class, p_implementation);
    PERFORM set_config('synchronous_commit', 'on', true);
    RETURN QUERY
    WITH found AS MATERIALIZED (
        SELECT j.tenant, j.operation, a.ctid AS pointer FROM fencepost.agenda AS a
        JOIN fencepost.job AS j ON j.tenant = a.tenant AND j.operation = a.operation AND j.class = a.class
        WHERE a.class = p_class AND a.priority < 2147483646
          AND j.exec = 'queued' AND j.generation = a.generation AND j.priority = a.priority AND j.epoch = a.epoch
          AND j.open_effects = 0 AND j.applied_effects = 0 AND NOT j.suspect
          AND NOT EXISTS (SELECT FROM fencepost.effect AS e WHERE e.tenant = j.tenant AND e.operation = j.operation AND e.class = j.class)
        ORDER BY a.priority DESC, a.due LIMIT p_limit FOR NO KEY UPDATE OF j SKIP LOCKED
    ), moved AS (
        UPDATE fencepost.job AS j SET exec = 'cancelled', generation = j.generation + 1, reason = 'transferred',
            detail = p_implementation, changed_at = clock_timestamp()
        FROM found AS f WHERE j.tenant = f.tenant AND j.operation = f.operation AND j.class = p_class
        RETURNING j.*, f.pointer
    ), used AS (
        DELETE FROM fencepost.agenda AS a USING moved AS m WHERE a.ctid = m.pointer
    )
    SELECT m.tenant, m.operation, m.args, m.source_event, m.priority, m.run_at, m.attempts FROM moved AS m;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count > 0 THEN
        INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
        VALUES (gen_random_uuid(), 'take_over', p_implementation, 'it owns the class', p_class, v_count || ' transferred');
    END IF;
END $$;

-- For the owner of a class: gives jobs that it took over back, with the attempts that they have used by now, in the transaction
-- that removes them from its own store. All of them or none: one that is not its own is refused (ZF060).
-- Locks: gate, then the jobs in the order of their keys.
CREATE OR REPLACE FUNCTION fencepost.give_back(
    p_class text, p_implementation text, p_tenants text[], p_operations text[], p_attempts integer[])
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count constant integer := cardinality(p_tenants);
    v_theirs bigint;
BEGIN
    IF v_count IS NULL OR v_count NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'not between 1 and 1000 jobs', 'jobs', 'give them back in several batches');
    ELSIF (cardinality(p_operations), cardinality(p_attempts)) IS DISTINCT FROM (v_count, v_count) THEN
        PERFORM fencepost._refuse('ZF003', 'the parts of the jobs are not equally many', 'jobs', 'give every part of every job');
    END IF;
    PERFORM fencepost.own(p_class, p_implementation);
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM FROM fencepost.job AS j
    WHERE j.class = p_class
      AND (j.tenant, j.operation) IN (SELECT u.tenant, u.operation FROM unnest(p_tenants, p_operations) AS u (tenant, operation))
    ORDER BY j.tenant, j.operation FOR NO KEY UPDATE;
    UPDATE fencepost.job AS j SET exec = 'queued', generation = j.generation + 1, attempts = greatest(j.attempts, u.attempts),
        run_at = greatest(j.run_at, clock_timestamp()), reason = 'given_back', detail = p_implementation, changed_at = clock_timestamp()
    FROM unnest(p_tenants, p_operations, p_attempts) AS u (tenant, operation, attempts)
    WHERE j.tenant = u.tenant AND j.operation = u.operation AND j.class = p_class
      AND j.exec = 'cancelled' AND j.reason = 'transferred' AND j.detail = p_implementation;
    GET DIAGNOSTICS v_theirs = ROW_COUNT;
    IF v_theirs <> v_count THEN
        PERFORM fencepost._refuse('ZF060', 'a job is not with this implementation, or is named twice', 'operation',
            'give back what was taken over, each job once');
    END IF;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
    VALUES (gen_random_uuid(), 'give_back', p_implementation, 'it owns the class', p_class, v_count || ' given back');
END $$;
