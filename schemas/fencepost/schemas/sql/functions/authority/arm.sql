-- The timeline of a running primary; the control file lags after a promotion.
CREATE OR REPLACE FUNCTION fencepost._timeline()
RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint
$$;

-- What the keeper of the witness compares before it arms or beats.
CREATE OR REPLACE FUNCTION fencepost.tip(
    OUT installation uuid, OUT seq bigint, OUT nonce uuid, OUT system_identifier bigint, OUT timeline bigint,
    OUT database_oid bigint, OUT armed boolean, OUT beat_at timestamptz)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT i.id, p.seq, p.nonce, c.system_identifier, fencepost._timeline(),
           (SELECT d.oid::bigint FROM pg_database AS d WHERE d.datname = current_database()), fencepost.armed(), p.beat_at
    FROM fencepost.installation AS i, fencepost.tip AS p, pg_control_system() AS c
$$;

-- Refuses unless the database's tip is what the witness says, on the same system and timeline.
CREATE OR REPLACE FUNCTION fencepost._require_witness(
    p_installation uuid, p_seq bigint, p_nonce uuid, p_system_identifier bigint, p_timeline bigint, p_database_oid bigint)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v record;
    v_hint constant text := 'an operator must find out what was restored or lost before anything acts again: fencepost doctor';
BEGIN
    PERFORM FROM fencepost.tip FOR UPDATE;
    SELECT * INTO v FROM fencepost.tip();
    IF v.installation <> p_installation THEN
        PERFORM fencepost._refuse('ZF002', 'the witness belongs to another installation', 'installation', 'check FENCEPOST_STATE');
    ELSIF v.system_identifier <> p_system_identifier THEN
        PERFORM fencepost._refuse('ZF002', 'the database runs on another system than the witness saw', 'system_identifier', v_hint);
    ELSIF v.database_oid <> p_database_oid THEN
        PERFORM fencepost._refuse('ZF002', 'this is another database than the witness saw: a copy or a restore', 'database', v_hint);
    ELSIF v.timeline <> p_timeline THEN
        PERFORM fencepost._refuse('ZF002', 'the database runs on another timeline than the witness saw', 'timeline', v_hint);
    ELSIF v.seq < p_seq THEN
        PERFORM fencepost._refuse('ZF002', 'the database is behind its witness: it was restored from an older copy', 'behind', v_hint);
    ELSIF v.seq > p_seq THEN
        PERFORM fencepost._refuse('ZF002', 'the database is ahead of its witness: the witness is stale', 'ahead', v_hint);
    ELSIF v.nonce <> p_nonce THEN
        PERFORM fencepost._refuse('ZF002', 'database and witness took different turns', 'nonce', v_hint);
    END IF;
END $$;

CREATE OR REPLACE FUNCTION fencepost._log_authority(p_kind text, p_detail jsonb)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_seq bigint;
    v_previous bytea;
BEGIN
    SELECT l.seq, l.hash INTO v_seq, v_previous FROM fencepost.authority_log AS l ORDER BY l.seq DESC LIMIT 1;
    v_seq := coalesce(v_seq, 0) + 1;
    v_previous := coalesce(v_previous, ''::bytea);
    INSERT INTO fencepost.authority_log (seq, kind, detail, previous, hash)
    VALUES (v_seq, p_kind, p_detail, v_previous,
            sha256(v_previous || convert_to(v_seq || ' ' || p_kind || ' ' || session_user || ' ' || p_detail::text, 'UTF8')));
END $$;

-- Arms this database: only by equality with the witness, never inside a subtransaction.
-- Locks: gate EXCLUSIVE (waits at most five seconds for those who use authority now).
CREATE OR REPLACE FUNCTION fencepost.arm(
    p_installation uuid, p_seq bigint, p_nonce uuid, p_next_seq bigint, p_next_nonce uuid,
    p_system_identifier bigint, p_timeline bigint, p_database_oid bigint)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    LOCK TABLE fencepost.gate IN EXCLUSIVE MODE;
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM fencepost._require_witness(p_installation, p_seq, p_nonce, p_system_identifier, p_timeline, p_database_oid);
    IF p_next_seq <> p_seq + 1 OR p_next_nonce = p_nonce THEN
        PERFORM fencepost._refuse('ZF003', 'next must follow the tip by one under a new nonce', 'next', NULL);
    END IF;
    UPDATE fencepost.tip SET seq = p_next_seq, nonce = p_next_nonce, beat_at = clock_timestamp();
    DELETE FROM fencepost.ticket;
    INSERT INTO fencepost.ticket (xid, postmaster_start, database_oid, table_oid, system_identifier, timeline, nonce)
    SELECT pg_current_xact_id(), pg_postmaster_start_time(), d.oid, 'fencepost.ticket'::regclass::oid,
           p_system_identifier, p_timeline, p_next_nonce
    FROM pg_database AS d WHERE d.datname = current_database();
    IF NOT fencepost.armed() THEN
        PERFORM fencepost._refuse('ZF004', 'arm was called inside a subtransaction', 'subtransaction', 'call it as a transaction of its own');
    END IF;
    PERFORM fencepost._log_authority('armed', jsonb_build_object('seq', p_next_seq, 'nonce', p_next_nonce));
END $$;

-- One beat of the witness: advances the tip by compare-and-set. A disarmed database does not beat.
CREATE OR REPLACE FUNCTION fencepost.beat(
    p_installation uuid, p_seq bigint, p_nonce uuid, p_next_seq bigint, p_next_nonce uuid,
    p_system_identifier bigint, p_timeline bigint, p_database_oid bigint)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM fencepost._require_witness(p_installation, p_seq, p_nonce, p_system_identifier, p_timeline, p_database_oid);
    IF p_next_seq <> p_seq + 1 OR p_next_nonce = p_nonce THEN
        PERFORM fencepost._refuse('ZF003', 'next must follow the tip by one under a new nonce', 'next', NULL);
    END IF;
    UPDATE fencepost.tip SET seq = p_next_seq, nonce = p_next_nonce, beat_at = clock_timestamp();
END $$;

-- One holder at a time for a maintenance duty; true for the holder. The lease is compared by the database clock.
CREATE OR REPLACE FUNCTION fencepost.lease_duty(p_name text, p_owner uuid, p_lease interval)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO fencepost.duty AS d (name, owner, lease_until) VALUES (p_name, p_owner, clock_timestamp() + p_lease)
    ON CONFLICT (name) DO UPDATE SET owner = p_owner, lease_until = clock_timestamp() + p_lease
        WHERE d.owner = p_owner OR d.lease_until <= clock_timestamp();
    RETURN FOUND;
END $$;
