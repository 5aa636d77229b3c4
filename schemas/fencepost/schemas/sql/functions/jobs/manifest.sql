-- Objects outside the database: published by a manifest row behind the fence, removed only while nothing references them.

-- Records, behind the fence of this tenant and operation, which objects its result consists of. The caller looks into the
-- store afterwards, in the same transaction: from here to its end nobody can begin to remove one of these objects.
-- Locks: objects, in the order of their names, so that publications with the same content wait for each other in turn.
CREATE OR REPLACE FUNCTION fencepost.record_objects(
    p_tenant text, p_operation text, p_store text, p_names text[], p_objects text[], p_sizes bigint[])
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count constant integer := cardinality(p_names);
    v_free integer;
BEGIN
    IF (cardinality(p_objects), cardinality(p_sizes)) IS DISTINCT FROM (v_count, v_count) OR v_count NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'a manifest has 1 to 1000 entries', 'objects', 'give name, object and size of each');
    END IF;
    PERFORM fencepost._require_identity('store', p_store);
    PERFORM fencepost._require_identity('name', n) FROM unnest(p_names) AS n;
    IF EXISTS (SELECT FROM unnest(p_objects, p_sizes) AS u (o, s) WHERE o IS NULL OR o !~ '^[0-9a-f]{64}$' OR s IS NULL OR s < 0) THEN
        PERFORM fencepost._refuse('ZF003', 'an object is not named by its sha256, or has no size', 'objects', 'pass what the store returned');
    END IF;
    PERFORM fencepost._require_fence(p_tenant, p_operation, 'INSERT', 'fencepost.manifest'::regclass);
    INSERT INTO fencepost.object (store, object)
    SELECT DISTINCT p_store, o FROM unnest(p_objects) AS o ORDER BY 2
    ON CONFLICT DO NOTHING;
    SELECT count(*) INTO v_free FROM (SELECT FROM fencepost.object AS b
        WHERE b.store = p_store AND b.object = ANY (p_objects) AND b.condemned_at IS NULL FOR KEY SHARE) AS f;
    IF v_free < (SELECT count(DISTINCT o) FROM unnest(p_objects) AS o) THEN
        PERFORM fencepost._refuse('ZF023', 'an object of the same content is being removed as an orphan', 'object',
            'put it again, then publish again');
    END IF;
    INSERT INTO fencepost.manifest (tenant, operation, name, store, object, size)
    SELECT p_tenant, p_operation, n, p_store, o, s FROM unnest(p_names, p_objects, p_sizes) AS u (n, o, s)
    ON CONFLICT (tenant, operation, name) DO NOTHING;
    IF EXISTS (SELECT FROM unnest(p_names, p_objects) AS u (n, o)
               WHERE NOT EXISTS (SELECT FROM fencepost.manifest AS m
                   WHERE m.tenant = p_tenant AND m.operation = p_operation AND m.name = u.n AND m.store = p_store AND m.object = u.o)) THEN
        PERFORM fencepost._refuse('ZF010', 'this operation has published another object under the same name', 'name',
            'a manifest never changes; publish under another name, or as another operation');
    END IF;
END $$;

-- Of these objects of a store, those that nothing references; of none, those whose removal began over a day ago and did not end.
CREATE OR REPLACE FUNCTION fencepost.orphans(p_store text, p_objects text[])
RETURNS SETOF text LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM fencepost.manifest AS m WHERE m.store = p_store) THEN
        -- A store of another database, or a database that was emptied: everything in it would look like an orphan.
        PERFORM fencepost._refuse('ZF003', 'this database has published nothing into this store', 'store',
            'give the store and the database that belong together');
    END IF;
    RETURN QUERY
    SELECT o FROM unnest(p_objects) AS o
    WHERE NOT EXISTS (SELECT FROM fencepost.object AS b WHERE b.store = p_store AND b.object = o)
    UNION ALL
    SELECT b.object FROM fencepost.object AS b
    WHERE cardinality(p_objects) = 0 AND b.store = p_store AND b.condemned_at < clock_timestamp() - interval '1 day';
END $$;

-- Announces, durably, that an orphan is about to be removed; nobody can reference it until that is over. Returns the mark
-- to end it with, or null: it is referenced, or somebody else is about to remove it.
-- Invariant: a mark is taken over only after a day, when whoever made it is no longer about to act on it.
CREATE OR REPLACE FUNCTION fencepost.condemn_object(p_store text, p_object text)
RETURNS timestamptz LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' AS $$
DECLARE
    v_mark timestamptz;
BEGIN
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    -- Waits here for a publication that may still reference it.
    INSERT INTO fencepost.object AS b (store, object, condemned_at) VALUES (p_store, p_object, clock_timestamp())
    ON CONFLICT (store, object) DO UPDATE SET condemned_at = excluded.condemned_at
    WHERE b.condemned_at < excluded.condemned_at - interval '1 day'
    RETURNING b.condemned_at INTO v_mark;
    RETURN v_mark;
END $$;

-- Ends a removal: the object is gone, or was left where it is.
CREATE OR REPLACE FUNCTION fencepost.forget_object(p_store text, p_object text, p_mark timestamptz)
RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DELETE FROM fencepost.object AS b WHERE b.store = p_store AND b.object = p_object AND b.condemned_at = p_mark
$$;

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'fencepost.manifest'::regclass AND tgname = 'append_only') THEN
        CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON fencepost.manifest
        FOR EACH STATEMENT EXECUTE FUNCTION fencepost._append_only();
    END IF;
END $$;
