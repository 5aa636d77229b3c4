-- Whatever takes a job out of the way of claim and completion, or back into it, is in its history, and whether it stands
-- still is kept beside it; whoever did it.
CREATE OR REPLACE FUNCTION fencepost._note_job()
RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.exec NOT IN ('queued', 'running', 'done') THEN
        DELETE FROM fencepost.job_hold AS h WHERE h.tenant = NEW.tenant AND h.operation = NEW.operation AND h.class = NEW.class;
    END IF;
    IF NEW.exec NOT IN ('queued', 'running', 'done') THEN
        INSERT INTO fencepost.job_hold (tenant, operation, class, state, since)
        VALUES (NEW.tenant, NEW.operation, NEW.class, NEW.exec, NEW.changed_at);
    END IF;
    INSERT INTO fencepost.job_event (tenant, operation, class, generation, attempt, was, became, reason, detail)
    VALUES (NEW.tenant, NEW.operation, NEW.class, NEW.generation, OLD.attempt, OLD.exec, NEW.exec, NEW.reason, NEW.detail);
    RETURN NULL;
END $$;
-- Locks: none where the trigger exists.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'fencepost.job'::regclass AND tgname = 'note_job') THEN
        CREATE TRIGGER note_job AFTER UPDATE ON fencepost.job FOR EACH ROW
        WHEN (OLD.exec <> NEW.exec AND NEW.exec <> 'running' AND NOT (OLD.exec = 'running' AND NEW.exec = 'done'))
        EXECUTE FUNCTION fencepost._note_job();
    END IF;
END $$;

-- Which attempts staged a result, when and how large; never what.
CREATE OR REPLACE VIEW fencepost.candidate AS
    SELECT s.tenant, s.operation, s.class, s.attempt, s.staged_at, octet_length(s.result) AS bytes FROM fencepost.staged AS s;
