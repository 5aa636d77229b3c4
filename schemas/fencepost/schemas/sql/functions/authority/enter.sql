-- True while this database may exercise authority: the ticket was written by the row's own transaction, in this
-- database, since this start of the server. A restart, a copy, a dump or a promotion makes it false.
CREATE OR REPLACE FUNCTION fencepost.armed()
RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (
        SELECT FROM fencepost.ticket AS t
        WHERE t.xmin = t.xid::xid
          AND t.postmaster_start = pg_postmaster_start_time()
          AND t.database_oid = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database()))
$$;

-- Every use of authority starts here: the gate first, the ticket in a later statement.
-- Locks: gate (ROW SHARE) before job before effect before domain rows.
CREATE OR REPLACE FUNCTION fencepost._enter()
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    LOCK TABLE fencepost.gate IN ROW SHARE MODE;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- An older snapshot would show the old epoch; the row lock raises 40001 if it changed since.
        PERFORM FROM fencepost.installation FOR SHARE;
    END IF;
    IF NOT fencepost.armed() THEN
        PERFORM fencepost._refuse('ZF001', 'this database is not armed', 'armed',
            'after a plain restart any relay or worker re-arms it; after a restore an operator must decide: fencepost doctor');
    ELSIF EXISTS (SELECT FROM fencepost.restriction AS r WHERE r.kind = 'principal' AND r.subject = session_user) THEN
        PERFORM fencepost._refuse('ZF061', 'this login is revoked', 'principal', 'an authority admin may lift it: fencepost authority lift');
    END IF;
END $$;

-- The epoch a tenant stands at: its own row, or the floor where that is higher.
CREATE OR REPLACE FUNCTION fencepost._epoch(p_tenant text)
RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT greatest(i.floor, (SELECT t.epoch FROM fencepost.tenant AS t WHERE t.tenant = p_tenant))
    FROM fencepost.installation AS i
$$;
