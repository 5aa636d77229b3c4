-- Queues: what is paused, who runs in classes with a limit, and whose turn it was in classes that serve tenants in turn.

-- Invariant: a claim holds ROW SHARE on this table until its commit; who pauses something, or limits a class that had no
-- limit, takes EXCLUSIVE: no claim that does not know of it is still under way after that.
CREATE TABLE fencepost.paused (
    scope     text NOT NULL CHECK (scope IN ('queue', 'class')),
    name      text NOT NULL,
    actor     text NOT NULL,
    reason    text NOT NULL,
    paused_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (scope, name)
);

-- One row for each class that has a limit or is fair, put in the place of the one before by each claim of the class, under
-- the lock of its row in job_class. A job that is named here runs while its own row says so, in this generation: whatever
-- ends a run writes nothing here. Each number is the next one, so that the newest row is found without walking over those
-- before it, whatever snapshots are held.
CREATE TABLE fencepost.turn (
    class       text NOT NULL,
    n           bigint NOT NULL,
    served      jsonb NOT NULL,
    tenants     text[] NOT NULL,
    operations  text[] NOT NULL,
    generations bigint[] NOT NULL,
    PRIMARY KEY (class, n),
    CHECK (cardinality(tenants) = cardinality(operations) AND cardinality(tenants) = cardinality(generations))
) WITH (vacuum_truncate = false);
COMMENT ON COLUMN fencepost.turn.served IS 'For each priority the tenant that was served last.';
