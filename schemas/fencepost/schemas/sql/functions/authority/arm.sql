-- The timeline of a running primary; the control file lags after a promotion.
CREATE OR REPLACE FUNCTION fencepost._timeline()
RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint
$$;

-- What the keeper of the witness compares before it arms or beats.
-- Tables of one row that were never analysed look large enough to compile the statement, which takes longer than a rotation.
CREATE OR REPLACE FUNCTION fencepost.tip(
    OUT installation uuid, OUT seq bigint, OUT nonce uuid, OUT system_identifier bigint, OUT timeline bigint,
    OUT database_oid bigint, OUT armed boolean, OUT beat_at timestamptz, OUT epoch bigint, OUT sealed boolean)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off AS $$
    SELECT i.id, p.seq, p.nonce, c.system_identifier, fencepost._timeline(),
           (SELECT d.oid::bigint FROM pg_database AS d WHERE d.datname = current_database()), fencepost.armed(), p.beat_at,
           i.epoch_counter, p.sealed_start IS NOT NULL
    FROM fencepost.installation AS i, fencepost.tip AS p, pg_control_system() AS c
$$;

-- Refuses unless the database's tip is what the witness says, on the same system and timeline; a seal on both sides lets it move.
CREATE OR REPLACE FUNCTION fencepost._require_witness(
    p_installation uuid, p_seq bigint, p_nonce uuid, p_system_identifier bigint, p_timeline bigint, p_database_oid bigint,
    p_sealed boolean DEFAULT false)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v record;
    v_moves boolean;
    v_hint constant text := 'an operator must find out what was restored or lost before anything acts again: fencepost doctor';
BEGIN
    PERFORM FROM fencepost.tip FOR UPDATE;
    SELECT * INTO v FROM fencepost.tip();
    v_moves := p_sealed AND v.sealed;
    IF v.installation <> p_installation THEN
        PERFORM fencepost._refuse('ZF002', 'the witness belongs to another installation', 'installation', 'check FENCEPOST_STATE');
    ELSIF v.system_identifier <> p_system_identifier AND NOT v_moves THEN
        PERFORM fencepost._refuse('ZF002', 'the database runs on another system than the witness saw', 'system_identifier', v_hint);
    ELSIF v.database_oid <> p_database_oid AND NOT v_moves THEN
        PERFORM fencepost._refuse('ZF002', 'this is another database than the witness saw: a copy or a restore', 'database', v_hint);
    ELSIF v.timeline <> p_timeline AND NOT v_moves THEN
        PERFORM fencepost._refuse('ZF002', 'the database runs on another timeline than the witness saw', 'timeline', v_hint);
    ELSIF v.seq < p_seq THEN
        PERFORM fencepost._refuse('ZF002', 'the database is behind its witness: it was restored from an older copy', 'behind', v_hint);
    ELSIF v.seq > p_seq THEN
        PERFORM fencepost._refuse('ZF002', 'the database is ahead of its witness: the witness is stale', 'ahead', v_hint);
    ELSIF v.nonce <> p_nonce THEN
        PERFORM fencepost._refuse('ZF002', 'database and witness took different turns', 'nonce', v_hint);
    END IF;
END $$;

-- Appends to the history of authority. Invariant: every entry's hash covers the one before it.
-- Locks: the history, so that entries are made one after the other.
CREATE OR REPLACE FUNCTION fencepost._log_authority(p_kind text, p_detail jsonb)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_seq bigint;
    v_previous bytea;
BEGIN
    LOCK TABLE fencepost.authority_log IN SHARE ROW EXCLUSIVE MODE;
    SELECT l.seq, l.hash INTO v_seq, v_previous FROM fencepost.authority_log AS l ORDER BY l.seq DESC LIMIT 1;
    v_seq := coalesce(v_seq, 0) + 1;
    v_previous := coalesce(v_previous, ''::bytea);
    INSERT INTO fencepost.authority_log (seq, kind, detail, previous, hash)
    VALUES (v_seq, p_kind, p_detail, v_previous, fencepost._authority_hash(v_previous, v_seq, p_kind, session_user, p_detail));
END $$;

CREATE OR REPLACE FUNCTION fencepost._authority_hash(p_previous bytea, p_seq bigint, p_kind text, p_actor text, p_detail jsonb)
RETURNS bytea LANGUAGE sql STABLE AS $$
    SELECT sha256(p_previous || convert_to(p_seq || ' ' || p_kind || ' ' || p_actor || ' ' || p_detail::text, 'UTF8'))
$$;

-- The last part of every way to become armed: the next turn as the tip, and a ticket of this very transaction.
CREATE OR REPLACE FUNCTION fencepost._take_turn(p_next_seq bigint, p_next_nonce uuid)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fencepost.tip SET seq = p_next_seq, nonce = p_next_nonce, beat_at = clock_timestamp(), sealed_start = NULL;
    DELETE FROM fencepost.ticket;
    INSERT INTO fencepost.ticket (xid, postmaster_start, database_oid, table_oid, system_identifier, timeline, nonce)
    SELECT pg_current_xact_id(), pg_postmaster_start_time(), d.oid, 'fencepost.ticket'::regclass::oid,
           c.system_identifier, fencepost._timeline(), p_next_nonce
    FROM pg_database AS d, pg_control_system() AS c WHERE d.datname = current_database();
    IF NOT fencepost.armed() THEN
        PERFORM fencepost._refuse('ZF004', 'it was called inside a subtransaction', 'subtransaction', 'call it as a transaction of its own');
    END IF;
END $$;

CREATE OR REPLACE FUNCTION fencepost._require_next(p_seq bigint, p_nonce uuid, p_next_seq bigint, p_next_nonce uuid)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF (p_next_seq = p_seq + 1 AND p_next_nonce <> p_nonce) IS NOT TRUE THEN
        PERFORM fencepost._refuse('ZF003', 'next must follow the tip by one under a new nonce', 'next', NULL);
    END IF;
END $$;

-- Arms this database: only by equality with the witness, never inside a subtransaction. A rotation or a restriction that the
-- witness was told of and this database was not is made now. A sealed database stays disarmed where the seal was written, until
-- it is restarted, moved, or armed on purpose (`p_unseal`).
-- Locks: gate EXCLUSIVE (waits at most five seconds for those who use authority now).
CREATE OR REPLACE FUNCTION fencepost.arm(
    p_installation uuid, p_seq bigint, p_nonce uuid, p_next_seq bigint, p_next_nonce uuid,
    p_system_identifier bigint, p_timeline bigint, p_database_oid bigint,
    p_epoch bigint, p_tenant text, p_restrictions text[], p_sealed boolean, p_unseal boolean)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_counter bigint;
    v_made text[];
BEGIN
    LOCK TABLE fencepost.gate IN EXCLUSIVE MODE;
    PERFORM fencepost._require_login();
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM fencepost._require_witness(p_installation, p_seq, p_nonce, p_system_identifier, p_timeline, p_database_oid, p_sealed);
    PERFORM fencepost._require_next(p_seq, p_nonce, p_next_seq, p_next_nonce);
    IF NOT p_unseal AND EXISTS (SELECT FROM fencepost.tip AS t WHERE t.sealed_start = pg_postmaster_start_time())
       AND EXISTS (SELECT FROM fencepost.tip() AS t WHERE t.system_identifier = p_system_identifier AND t.timeline = p_timeline
                                                      AND t.database_oid = p_database_oid) THEN
        PERFORM fencepost._refuse('ZF002', 'the database is sealed for a planned move', 'sealed',
            'move or restart it, or break the seal: fencepost authority arm');
    END IF;
    SELECT i.epoch_counter INTO STRICT v_counter FROM fencepost.installation AS i;
    IF (p_epoch >= v_counter) IS NOT TRUE THEN
        PERFORM fencepost._refuse('ZF002', 'the witness knows only older epochs than this database', 'epoch',
            'the witness is stale; an operator must decide: fencepost doctor');
    END IF;
    PERFORM fencepost._take_turn(p_next_seq, p_next_nonce);
    PERFORM fencepost._log_authority('armed', jsonb_build_object('seq', p_next_seq, 'nonce', p_next_nonce));
    v_made := fencepost._restrict(p_restrictions, 'the witness says so');
    IF cardinality(v_made) > 0 THEN
        PERFORM fencepost._log_authority('restricted', jsonb_build_object('restrictions', v_made, 'rolled_forward', true));
    END IF;
    IF p_epoch > v_counter THEN
        -- Crash here: [V] the witness was told of a rotation, and its transaction here was lost.
        PERFORM fencepost._rotate(p_tenant, p_epoch);
        PERFORM fencepost._log_authority('rotated', jsonb_build_object('epoch', p_epoch, 'tenant', p_tenant, 'rolled_forward', true));
    END IF;
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
    PERFORM fencepost._require_next(p_seq, p_nonce, p_next_seq, p_next_nonce);
    UPDATE fencepost.tip SET seq = p_next_seq, nonce = p_next_nonce, beat_at = clock_timestamp();
END $$;

-- One holder at a time for a maintenance duty; true for the holder. The lease is compared by the database clock.
CREATE OR REPLACE FUNCTION fencepost.lease_duty(p_name text, p_owner uuid, p_lease interval)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._require_login();
    INSERT INTO fencepost.duty AS d (name, owner, lease_until) VALUES (p_name, p_owner, clock_timestamp() + p_lease)
    ON CONFLICT (name) DO UPDATE SET owner = p_owner, lease_until = clock_timestamp() + p_lease
        WHERE d.owner = p_owner OR d.lease_until <= clock_timestamp();
    RETURN FOUND;
END $$;
