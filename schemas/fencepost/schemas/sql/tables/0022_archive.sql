-- Finished jobs leave the tables that are worked with: the row in `job` stays for ever as the identity of the work (what it
-- meant, what became of it and when), with its effects and their history; everything else goes into the archive.

-- Invariant: what is archived never runs again, whatever a function forgets to look at.
ALTER TABLE fencepost.job
    ADD COLUMN archived_at timestamptz,
    ADD CONSTRAINT job_archived_check CHECK (archived_at IS NULL OR exec IN ('done', 'cancelled'));

-- How long finished jobs of a class stay as they are; without a row for ever. passed_at: when a walk through all of them last ended.
CREATE TABLE fencepost.job_retention (
    class         text PRIMARY KEY,
    finished_keep interval NOT NULL CHECK (finished_keep >= '1 hour'),
    passed_at     timestamptz,
    changed_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- How long the archive keeps what it was given; without a row for ever.
CREATE TABLE fencepost.archive_retention (
    singleton    boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    archive_keep interval NOT NULL CHECK (archive_keep >= '1 day'),
    changed_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Whole rows of finished jobs: of which table, and what. One partition for each month (UTC), made when the first row comes.
CREATE TABLE fencepost.archive (
    archived_at timestamptz NOT NULL,
    tenant      text NOT NULL,
    operation   text NOT NULL,
    class       text NOT NULL,
    kind        text NOT NULL CHECK (kind IN (
                'job', 'attempt', 'staged', 'publication', 'job_event', 'signal', 'wait', 'progress', 'result')),
    content     jsonb NOT NULL
) PARTITION BY RANGE (archived_at);
CREATE INDEX archive_job ON fencepost.archive (tenant, operation, class, kind);
