-- History stays: these tables take inserts only, from anybody. Where a trigger looks at each row that goes, it may go to the archive.
CREATE OR REPLACE FUNCTION fencepost._append_only()
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('fencepost.archiving', true) = pg_current_xact_id()::text
       AND EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgrelid = TG_RELID AND t.tgname = 'archived_only' AND t.tgenabled = 'O') THEN
        RETURN NULL;
    END IF;
    PERFORM fencepost._refuse('ZF003', TG_TABLE_NAME || ' is append-only', TG_TABLE_NAME, 'history is never changed');
    RETURN NULL;
END $$;

-- Invariant: a generation never decreases; a lower one would give an old fence its authority back. Looked at after the
-- row was written: before it, every row would be locked once more.
CREATE OR REPLACE FUNCTION fencepost._generation_guard()
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._refuse('ZF020', 'a generation never decreases', 'generation', NULL);
    RETURN NULL;
END $$;

-- Locks: none where the trigger exists. Creating it, even the same again, locks out every writer of its table, and a
-- later run of the migrations would deadlock with work under way.
DO $$
DECLARE
    v_table text;
BEGIN
    FOREACH v_table IN ARRAY ARRAY['authority_log', 'decision', 'attempt', 'staged', 'publication', 'effect_event', 'signal', 'result',
                                   'job_event', 'archive'] LOOP
        IF NOT EXISTS (SELECT FROM pg_trigger
                       WHERE tgrelid = format('fencepost.%I', v_table)::regclass AND tgname = 'append_only') THEN
            EXECUTE format('CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON fencepost.%I '
                           'FOR EACH STATEMENT EXECUTE FUNCTION fencepost._append_only()', v_table);
        END IF;
    END LOOP;
    FOREACH v_table IN ARRAY ARRAY['job', 'slot'] LOOP
        IF NOT EXISTS (SELECT FROM pg_trigger
                       WHERE tgrelid = format('fencepost.%I', v_table)::regclass AND tgname = 'generation_guard') THEN
            EXECUTE format('CREATE TRIGGER generation_guard AFTER UPDATE ON fencepost.%I FOR EACH ROW '
                           'WHEN (NEW.generation < OLD.generation) EXECUTE FUNCTION fencepost._generation_guard()', v_table);
        END IF;
    END LOOP;
END $$;
