-- Protected tables: PostgreSQL refuses every write of a row whose tenant and operation are not those of a fence that the
-- same transaction holds. The fence itself is checked once more at the commit, by the guard of its publication.

-- Invariant: only a fence taken by this transaction counts, and not one that a savepoint took back. xid alone would not do:
-- in a restored copy numbers come again, but the row's own xmin is then older than this transaction.
CREATE OR REPLACE FUNCTION fencepost._require_fence(p_tenant text, p_operation text, p_act text, p_table oid)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- The column's own collation could find two different tenants equal.
    IF EXISTS (SELECT FROM fencepost.publication AS p
               WHERE p.tenant = p_tenant COLLATE "default" AND p.operation = p_operation COLLATE "default"
                 AND p.xid = pg_current_xact_id_if_assigned() AND age(p.xmin) <= 0) THEN
        RETURN;
    ELSIF p_tenant IS NULL OR p_operation IS NULL THEN
        PERFORM fencepost._refuse('ZF022', format('%s of a row of %s that names no tenant or no operation', p_act, p_table::regclass),
            CASE WHEN p_tenant IS NULL THEN 'tenant' ELSE 'operation' END, 'fill both columns from the fence');
    END IF;
    PERFORM fencepost._refuse('ZF022', format('%s of a row of %s without the fence of its tenant and operation', p_act, p_table::regclass),
        'fence', 'write it inside a publication, with the tenant and the operation of the job that publishes');
END $$;

-- Every row of a table has some tenant and operation, so no fence covers all of them.
CREATE OR REPLACE FUNCTION fencepost._protected_truncate()
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._refuse('ZF022', format('TRUNCATE of the protected table %s', TG_RELID::regclass), 'truncate',
        'delete rows behind their fences, or let the owner unprotect the table');
    RETURN NULL;
END $$;

-- Makes the trigger function of one table. It reads two columns by name and nothing else of the row.
-- Invariant: it runs as our owner, so no cast or operator of a type of somebody else's may run in it; types are looked at
-- in each call, because the table's owner may change them.
CREATE OR REPLACE FUNCTION fencepost._make_guard(p_id bigint, p_tenant name, p_operation name)
RETURNS void LANGUAGE plpgsql AS $make$
DECLARE
    v_check constant text := $check$
    IF pg_typeof(%3$s.%1$I) <> ALL ('{text,varchar,uuid,integer,bigint}'::regtype[])
       OR pg_typeof(%3$s.%2$I) <> ALL ('{text,varchar,uuid,integer,bigint}'::regtype[]) THEN
        PERFORM fencepost._refuse('ZF022', format('the columns of %%s have changed', TG_RELID::regclass), 'columns', 'protect it again');
    END IF;
    PERFORM fencepost._require_fence(%3$s.%1$I::text, %3$s.%2$I::text, TG_OP, TG_RELID);$check$;
    v_old constant text := format(v_check, p_tenant, p_operation, 'OLD');
    v_new constant text := format(v_check, p_tenant, p_operation, 'NEW');
    v_moved constant text := format('OLD.%1$I::text COLLATE "default" IS DISTINCT FROM NEW.%1$I::text COLLATE "default"'
        ' OR OLD.%2$I::text COLLATE "default" IS DISTINCT FROM NEW.%2$I::text COLLATE "default"', p_tenant, p_operation);
BEGIN
    EXECUTE format('CREATE OR REPLACE FUNCTION fencepost.%I() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER '
                   'SET search_path = pg_catalog, pg_temp AS %L', '_protected_' || p_id,
        'BEGIN IF TG_OP = ''DELETE'' THEN' || v_old || ' ELSE' || v_new || ' IF TG_OP = ''UPDATE'' THEN IF ' || v_moved || ' THEN'
        || v_old || ' END IF; END IF; END IF; RETURN NULL; END');
    EXECUTE format('REVOKE ALL ON FUNCTION fencepost.%I() FROM PUBLIC', '_protected_' || p_id);
END $make$;

-- A runtime login that could take the protection off: it is, or can become, the owner of the table or of its schema, or
-- may switch triggers off for its session. Null when there is none, or when the installation does not separate roles.
CREATE OR REPLACE FUNCTION fencepost._protection_reach(p_table oid)
RETURNS text LANGUAGE sql STABLE AS $$
    SELECT min(m.rolname)
    FROM pg_roles AS m
    JOIN pg_roles AS r ON pg_has_role(m.oid, r.oid, 'MEMBER')
    JOIN fencepost.installation AS i ON NOT i.single_role
     AND r.rolname IN (SELECT 'fencepost_' || i.name || '_' || n
                       FROM unnest('{producer,relay,consumer,executor,projector,armer,maintenance}'::text[]) AS n)
    JOIN pg_class AS c ON c.oid = p_table
    JOIN pg_namespace AS s ON s.oid = c.relnamespace
    WHERE NOT m.rolsuper
      AND (pg_has_role(m.oid, c.relowner, 'MEMBER') OR pg_has_role(m.oid, s.nspowner, 'MEMBER')
           OR has_parameter_privilege(m.oid, 'session_replication_role', 'SET'))
$$;

-- Unlike to_regclass, it needs no right to the table's schema.
CREATE OR REPLACE FUNCTION fencepost._table_named(p_name text)
RETURNS oid LANGUAGE sql STABLE AS $$
    SELECT c.oid FROM pg_class AS c JOIN pg_namespace AS s ON s.oid = c.relnamespace
    WHERE format('%I.%I', s.nspname, c.relname) = p_name
$$;

-- Every protected table, and the first thing that is wrong with its protection, or null.
CREATE OR REPLACE FUNCTION fencepost.protection()
RETURNS TABLE (relation text, tenant_column text, operation_column text, protected_by text, protected_at timestamptz, fault text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(r.oid::regclass::text, p.relation), p.tenant_column, p.operation_column, p.protected_by, p.protected_at,
        CASE
            WHEN g.bare IS NOT NULL THEN 'no enabled trigger on ' || g.bare
            WHEN g.truncatable IS NOT NULL THEN 'TRUNCATE of ' || g.truncatable || ' is not refused'
            WHEN g.foreign_owner IS NOT NULL THEN g.foreign_owner || ' has another owner'
            WHEN (SELECT count(*) FROM pg_attribute AS a WHERE a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped
                    AND a.attname IN (p.tenant_column, p.operation_column)) < 2 THEN 'a column is gone'
            WHEN fencepost._protection_reach(r.oid) IS NOT NULL
                THEN 'the login ' || quote_ident(fencepost._protection_reach(r.oid)) || ' can take it off'
        END
    FROM fencepost.protected AS p
    CROSS JOIN LATERAL (SELECT to_regproc('fencepost._protected_' || p.id) AS oid) AS f
    LEFT JOIN LATERAL (
        SELECT coalesce((SELECT t.tgrelid FROM pg_trigger AS t WHERE t.tgfoid = f.oid AND t.tgparentid = 0 LIMIT 1),
                        fencepost._table_named(p.relation)) AS oid) AS r ON true
    LEFT JOIN LATERAL (
        SELECT min(l.oid::regclass::text) FILTER (WHERE NOT EXISTS (
                   SELECT FROM pg_trigger AS t WHERE t.tgrelid = l.oid AND t.tgfoid = f.oid AND t.tgenabled IN ('O', 'A'))) AS bare,
               min(l.oid::regclass::text) FILTER (WHERE NOT EXISTS (
                   SELECT FROM pg_trigger AS t WHERE t.tgrelid = l.oid AND t.tgenabled IN ('O', 'A')
                      AND t.tgfoid = 'fencepost._protected_truncate'::regproc)) AS truncatable,
               min(l.oid::regclass::text) FILTER (WHERE l.relowner <> (SELECT c.relowner FROM pg_class AS c WHERE c.oid = r.oid))
                   AS foreign_owner
        FROM pg_class AS l
        WHERE l.oid = r.oid OR l.oid IN (SELECT d.relid FROM pg_partition_tree(r.oid) AS d)
           OR l.oid IN (SELECT h.inhrelid FROM pg_inherits AS h WHERE h.inhparent = r.oid)) AS g ON true
    -- A table that was dropped has nothing left to protect.
    WHERE r.oid IS NOT NULL
    ORDER BY 1
$$;

-- First half of protect: looks whether the table can be protected, registers it and makes its trigger function, which the
-- table's owner may use until the second half. Returns the function's name.
CREATE OR REPLACE FUNCTION fencepost.begin_protection(p_table regclass, p_tenant text, p_operation text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_class pg_class;
    v_id bigint;
    v_stale bigint;
    v_found text;
    v_column record;
BEGIN
    PERFORM fencepost._require_login();
    LOCK TABLE fencepost.protected IN SHARE ROW EXCLUSIVE MODE;
    SELECT c.* INTO v_class FROM pg_class AS c WHERE c.oid = p_table;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such table', 'table', 'name a table, with its schema');
    ELSIF NOT pg_has_role(session_user, v_class.relowner, 'MEMBER') THEN
        PERFORM fencepost._refuse('ZF003', format('this login does not own %s', p_table), 'table', 'let its owner protect it');
    ELSIF v_class.relkind NOT IN ('r', 'p') OR v_class.relpersistence = 't'
       OR v_class.relnamespace IN ('fencepost'::regnamespace, 'pg_catalog'::regnamespace) THEN
        PERFORM fencepost._refuse('ZF003', format('%s is not a table that can be protected', p_table), 'table',
            'name an ordinary or partitioned table of your own');
    ELSIF EXISTS (SELECT FROM pg_inherits AS h WHERE h.inhrelid = p_table OR h.inhparent = p_table AND v_class.relkind = 'r') THEN
        PERFORM fencepost._refuse('ZF003', format('%s is a partition or has to do with inheritance', p_table), 'table',
            'protect the partitioned table, which covers its partitions');
    END IF;
    SELECT d.relid::regclass::text INTO v_found FROM pg_partition_tree(p_table) AS d JOIN pg_class AS c ON c.oid = d.relid
    WHERE c.relowner <> v_class.relowner OR c.relkind NOT IN ('r', 'p') LIMIT 1;
    IF FOUND THEN
        PERFORM fencepost._refuse('ZF003', format('the partition %s has another owner or is a foreign table', v_found), 'partition',
            'give all partitions to the owner of the table');
    END IF;
    v_found := fencepost._protection_reach(p_table);
    IF v_found IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF003', format('the runtime login %I could take the protection of %s off', v_found, p_table), 'owner',
            'give table and schema to a role that no producer, consumer, relay or worker is a member of');
    END IF;
    FOR v_column IN
        SELECT n.field, n.name, a.attname, a.atttypid, a.attgenerated
        FROM (VALUES ('tenant', p_tenant), ('operation', p_operation)) AS n (field, name)
        LEFT JOIN pg_attribute AS a ON a.attrelid = p_table AND a.attname = n.name AND a.attnum > 0 AND NOT a.attisdropped
    LOOP
        IF v_column.attname IS NULL THEN
            PERFORM fencepost._refuse('ZF003', format('%s has no such column', p_table), v_column.field, 'name a column of the table');
        ELSIF v_column.atttypid <> ALL ('{text,varchar,uuid,integer,bigint}'::regtype[]) OR v_column.attgenerated = 'v' THEN
            PERFORM fencepost._refuse('ZF003', format('the type of this column of %s cannot be compared', p_table), v_column.field,
                'use a stored column of type text, varchar, uuid, integer or bigint');
        END IF;
    END LOOP;
    IF p_tenant = p_operation THEN
        PERFORM fencepost._refuse('ZF003', 'tenant and operation are the same column', 'operation', 'name two columns');
    END IF;

    FOR v_stale IN
        SELECT p.id FROM fencepost.protected AS p
        WHERE fencepost._table_named(p.relation) IS NULL
          AND NOT EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgfoid = to_regproc('fencepost._protected_' || p.id))
    LOOP
        PERFORM fencepost._forget_protection(v_stale);
    END LOOP;
    v_id := fencepost._protection_of(p_table);
    IF v_id IS NULL THEN
        -- A table that was renamed leaves its old name to another.
        UPDATE fencepost.protected AS p SET relation = t.tgrelid::regclass::text
        FROM pg_trigger AS t
        WHERE p.relation = p_table::text AND t.tgfoid = to_regproc('fencepost._protected_' || p.id) AND t.tgparentid = 0;
        INSERT INTO fencepost.protected (relation, tenant_column, operation_column) VALUES (p_table::text, p_tenant, p_operation)
        RETURNING id INTO v_id;
    ELSE
        UPDATE fencepost.protected AS p SET relation = p_table::text, tenant_column = p_tenant, operation_column = p_operation,
            protected_by = session_user, protected_at = clock_timestamp()
        WHERE p.id = v_id;
    END IF;
    PERFORM fencepost._make_guard(v_id, p_tenant, p_operation);
    PERFORM fencepost._lend_guard(v_id, v_class.relowner, true);
    RETURN '_protected_' || v_id;
END $$;

-- Second half of protect and of unprotect: with the triggers there, looks that they are whole; with none, forgets the table.
CREATE OR REPLACE FUNCTION fencepost.end_protection(p_table regclass)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_owner oid;
    v_id bigint;
    v_fault text;
BEGIN
    PERFORM fencepost._require_login();
    LOCK TABLE fencepost.protected IN SHARE ROW EXCLUSIVE MODE;
    SELECT c.relowner INTO v_owner FROM pg_class AS c WHERE c.oid = p_table;
    IF NOT coalesce(pg_has_role(session_user, v_owner, 'MEMBER'), false) THEN
        PERFORM fencepost._refuse('ZF003', format('this login does not own %s', p_table), 'table', 'let its owner do it');
    END IF;
    v_id := fencepost._protection_of(p_table);
    IF v_id IS NULL THEN
        PERFORM fencepost._refuse('ZF003', format('%s is not protected', p_table), 'table', 'list what is: fencepost jobs protected');
    END IF;
    IF NOT EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgfoid = to_regproc('fencepost._protected_' || v_id)) THEN
        PERFORM fencepost._forget_protection(v_id);
        RETURN;
    END IF;
    PERFORM fencepost._lend_guard(v_id, v_owner, false);
    SELECT p.fault INTO v_fault FROM fencepost.protection() AS p WHERE p.relation = p_table::text;
    IF v_fault IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF003', format('%s is not protected: %s', p_table, v_fault), 'table', 'protect it again');
    END IF;
END $$;

-- The entry of a table: the one whose function its triggers call, else the one of its name that no table uses.
CREATE OR REPLACE FUNCTION fencepost._protection_of(p_table regclass)
RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT coalesce(
        (SELECT p.id FROM fencepost.protected AS p JOIN pg_trigger AS t ON t.tgfoid = to_regproc('fencepost._protected_' || p.id)
         WHERE t.tgrelid = p_table LIMIT 1),
        (SELECT p.id FROM fencepost.protected AS p
         WHERE p.relation = p_table::text
           AND NOT EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgfoid = to_regproc('fencepost._protected_' || p.id))))
$$;

CREATE OR REPLACE FUNCTION fencepost._forget_protection(p_id bigint)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('DROP FUNCTION IF EXISTS fencepost.%I()', '_protected_' || p_id);
    DELETE FROM fencepost.protected AS p WHERE p.id = p_id;
END $$;

-- To create a trigger one must be allowed to execute its function; afterwards nobody needs to be.
CREATE OR REPLACE FUNCTION fencepost._lend_guard(p_id bigint, p_owner oid, p_lend boolean)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF pg_get_userbyid(p_owner) <> current_user THEN
        EXECUTE format(CASE WHEN p_lend THEN 'GRANT EXECUTE ON FUNCTION fencepost.%1$I(), fencepost._protected_truncate() TO %2$I'
                       ELSE 'REVOKE EXECUTE ON FUNCTION fencepost.%1$I(), fencepost._protected_truncate() FROM %2$I' END,
            '_protected_' || p_id, pg_get_userbyid(p_owner));
    END IF;
END $$;

-- Protects a table from its next write on; again, it repairs, covers new partitions and may name other columns.
-- Runs as the caller, who must own the table: only an owner may create and drop these triggers, or disable them.
-- Row triggers come to later partitions by themselves; the refusal of TRUNCATE does not, and is made by calling it again.
-- Locks: the table and its partitions, against everybody, until the commit.
CREATE OR REPLACE FUNCTION fencepost.protect(p_table regclass, p_tenant text, p_operation text)
RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' SET client_min_messages = warning AS $$
DECLARE
    v_function constant text := fencepost.begin_protection(p_table, p_tenant, p_operation);
    v_part regclass;
BEGIN
    EXECUTE format('DROP TRIGGER IF EXISTS fencepost_protected ON %s', p_table);
    EXECUTE format('CREATE TRIGGER fencepost_protected AFTER INSERT OR UPDATE OR DELETE ON %s '
                   'FOR EACH ROW EXECUTE FUNCTION fencepost.%I()', p_table, v_function);
    FOR v_part IN SELECT p_table UNION SELECT d.relid FROM pg_partition_tree(p_table) AS d LOOP
        EXECUTE format('DROP TRIGGER IF EXISTS fencepost_protected_truncate ON %s', v_part);
        EXECUTE format('CREATE TRIGGER fencepost_protected_truncate BEFORE TRUNCATE ON %s '
                       'FOR EACH STATEMENT EXECUTE FUNCTION fencepost._protected_truncate()', v_part);
    END LOOP;
    PERFORM fencepost.end_protection(p_table);
END $$;

-- Takes the protection of a table off. Runs as the caller, who must own the table.
-- Locks: the table and its partitions, against everybody, until the commit.
CREATE OR REPLACE FUNCTION fencepost.unprotect(p_table regclass)
RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' SET client_min_messages = warning AS $$
DECLARE
    v_part regclass;
BEGIN
    IF p_table IS NULL THEN
        PERFORM fencepost.begin_protection(NULL, NULL, NULL);
    END IF;
    EXECUTE format('DROP TRIGGER IF EXISTS fencepost_protected ON %s', p_table);
    FOR v_part IN SELECT p_table UNION SELECT d.relid FROM pg_partition_tree(p_table) AS d LOOP
        EXECUTE format('DROP TRIGGER IF EXISTS fencepost_protected_truncate ON %s', v_part);
    END LOOP;
    PERFORM fencepost.end_protection(p_table);
END $$;

-- What this version makes differently reaches the tables that are protected already; nothing of theirs is locked.
DO $$
BEGIN
    PERFORM fencepost._make_guard(p.id, p.tenant_column, p.operation_column) FROM fencepost.protected AS p;
END $$;
