-- Begins a change of authority: takes the gate for the rest of the caller's transaction, and refuses unless this database is
-- armed, equal to its witness, and at the version of the history that was looked at (null: whatever it is).
-- Locks: gate EXCLUSIVE (waits at most five seconds for those who use authority now).
CREATE OR REPLACE FUNCTION fencepost.begin_change(
    p_installation uuid, p_seq bigint, p_nonce uuid, p_system_identifier bigint, p_timeline bigint, p_database_oid bigint, p_version bigint)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._change(p_version);
    PERFORM fencepost._require_witness(p_installation, p_seq, p_nonce, p_system_identifier, p_timeline, p_database_oid);
END $$;

-- What every change of authority in an armed database begins with.
CREATE OR REPLACE FUNCTION fencepost._change(p_version bigint)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM fencepost._refuse('ZF004', 'a change of authority needs READ COMMITTED', 'isolation', 'use a read committed transaction');
    END IF;
    LOCK TABLE fencepost.gate IN EXCLUSIVE MODE;
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM fencepost._require_authority_version(p_version);
END $$;

-- What a change of authority ends with where it changes nothing of the installation's row: whoever enters with an older snapshot
-- is refused (40001) by that row, and cannot act upon what was before.
CREATE OR REPLACE FUNCTION fencepost._outdate()
RETURNS void LANGUAGE sql AS $$
    UPDATE fencepost.installation SET floor = floor
$$;

-- Refuses a login that was revoked, where `_enter` does not: the database need not be armed.
CREATE OR REPLACE FUNCTION fencepost._require_login()
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM fencepost.restriction AS r WHERE r.kind = 'principal' AND r.subject = session_user) THEN
        PERFORM fencepost._refuse('ZF061', 'this login is revoked', 'principal', 'an authority admin may lift it: fencepost authority lift');
    END IF;
END $$;

CREATE OR REPLACE FUNCTION fencepost._require_authority_version(p_version bigint)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_version IS NOT NULL AND p_version <> (SELECT max(l.seq) FROM fencepost.authority_log AS l) THEN
        PERFORM fencepost._refuse('ZF035', 'authority changed since it was looked at', 'version', 'look again: fencepost authority status');
    END IF;
END $$;

-- Takes this database's authority away: only `arm`, `rotate` and `recover` give it back. Takes no gate, for whoever changes
-- authority holds it on another session; transactions under way that passed it still end.
CREATE OR REPLACE FUNCTION fencepost.disarm()
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_login();
    PERFORM set_config('synchronous_commit', 'on', true);
    DELETE FROM fencepost.ticket;
    PERFORM fencepost._outdate();
END $$;

-- Makes the turn that the witness was told of, and arms: a new epoch for a tenant or (null) for everybody where `p_epoch` is
-- new, and every restriction that is not there yet. Refused while the database is armed: a change whose commit is lost must
-- leave nothing armed that the witness knows to be old.
-- Crash here: [V] between the witness and this commit everything is refused; the next arm makes the change.
-- Locks: gate EXCLUSIVE, then the running jobs.
CREATE OR REPLACE FUNCTION fencepost.rotate(
    p_installation uuid, p_seq bigint, p_nonce uuid, p_next_seq bigint, p_next_nonce uuid,
    p_system_identifier bigint, p_timeline bigint, p_database_oid bigint,
    p_epoch bigint, p_tenant text, p_restrictions text[], p_actor text, p_reason text, p_evidence text,
    OUT held bigint, OUT blocked bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_counter bigint;
    v_made text[];
    v_detail jsonb;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    IF p_tenant IS NOT NULL THEN
        PERFORM fencepost._require_identity('tenant', p_tenant);
    END IF;
    LOCK TABLE fencepost.gate IN EXCLUSIVE MODE;
    PERFORM fencepost._require_login();
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM fencepost._require_witness(p_installation, p_seq, p_nonce, p_system_identifier, p_timeline, p_database_oid);
    PERFORM fencepost._require_next(p_seq, p_nonce, p_next_seq, p_next_nonce);
    SELECT i.epoch_counter INTO STRICT v_counter FROM fencepost.installation AS i;
    IF fencepost.armed() THEN
        PERFORM fencepost._refuse('ZF003', 'the database is armed: its witness would run ahead of it', 'armed',
            'disarm it, tell the witness, then rotate: fencepost authority rotate');
    ELSIF (p_epoch BETWEEN v_counter AND v_counter + 1) IS NOT TRUE THEN
        PERFORM fencepost._refuse('ZF003', 'the epoch does not follow this database''s', 'epoch', NULL);
    END IF;
    PERFORM fencepost._take_turn(p_next_seq, p_next_nonce);
    v_detail := jsonb_build_object('actor', p_actor, 'reason', p_reason, 'evidence', p_evidence);
    held := 0;
    blocked := 0;
    IF p_epoch > v_counter THEN
        SELECT r.held, r.blocked INTO held, blocked FROM fencepost._rotate(p_tenant, p_epoch) AS r;
        PERFORM fencepost._log_authority('rotated', v_detail || jsonb_build_object(
            'epoch', p_epoch, 'tenant', p_tenant, 'held', held, 'blocked', blocked));
    END IF;
    v_made := fencepost._restrict(p_restrictions, p_reason);
    IF cardinality(v_made) > 0 THEN
        PERFORM fencepost._log_authority('restricted', v_detail || jsonb_build_object('restrictions', v_made));
    END IF;
END $$;

-- A new epoch, under the gate: frozen until the thaw; running work is taken away from its attempts, queued work is held by
-- comparison.
CREATE OR REPLACE FUNCTION fencepost._rotate(p_tenant text, p_epoch bigint, OUT held bigint, OUT blocked bigint)
LANGUAGE plpgsql AS $$
BEGIN
    IF p_tenant IS NULL THEN
        UPDATE fencepost.installation SET epoch_counter = p_epoch, floor = p_epoch, frozen = true;
    ELSE
        UPDATE fencepost.installation SET epoch_counter = p_epoch;
        INSERT INTO fencepost.tenant AS t (tenant, epoch, frozen) VALUES (p_tenant, p_epoch, true)
        ON CONFLICT (tenant) DO UPDATE SET epoch = p_epoch, frozen = true, changed_at = clock_timestamp();
    END IF;
    SELECT r.held, r.blocked INTO held, blocked FROM fencepost._hold_running(p_tenant, NULL, 'old_epoch') AS r;
END $$;

-- Takes running jobs of a tenant, a class or everybody away from their attempts: held, or blocked by what they left pending.
-- Found by the pointers to their leases. Nobody else has them: the gate is held.
CREATE OR REPLACE FUNCTION fencepost._hold_running(p_tenant text, p_class text, p_reason text, OUT held bigint, OUT blocked bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_key record;
    v_exec text;
BEGIN
    held := 0;
    blocked := 0;
    FOR v_key IN
        SELECT DISTINCT j.tenant, j.operation, j.class
        FROM fencepost.job_class AS k
        JOIN fencepost.agenda AS a ON a.class = k.class AND a.priority = 2147483647
        JOIN fencepost.job AS j ON j.tenant = a.tenant AND j.operation = a.operation AND j.class = a.class
        WHERE j.exec = 'running' AND j.tenant = coalesce(p_tenant, j.tenant) AND k.class = coalesce(p_class, k.class)
        ORDER BY 1, 2, 3
    LOOP
        PERFORM fencepost._forget(e.tenant, e.operation, e.effect_key, p_reason)
        FROM fencepost.effect AS e
        WHERE e.tenant = v_key.tenant AND e.operation = v_key.operation AND e.class = v_key.class AND e.state = 'pending';
        UPDATE fencepost.job AS j SET exec = CASE WHEN j.open_effects > 0 THEN 'blocked' ELSE 'held' END,
            generation = j.generation + 1, attempt = NULL, owner = NULL, lease_until = NULL,
            reason = CASE WHEN j.open_effects > 0 THEN 'effect_unknown' ELSE p_reason END,
            detail = CASE WHEN j.open_effects > 0 THEN p_reason ELSE '' END, changed_at = clock_timestamp()
        WHERE j.tenant = v_key.tenant AND j.operation = v_key.operation AND j.class = v_key.class
        RETURNING j.exec INTO v_exec;
        held := held + CASE v_exec WHEN 'held' THEN 1 ELSE 0 END;
        blocked := blocked + CASE v_exec WHEN 'blocked' THEN 1 ELSE 0 END;
    END LOOP;
END $$;
