-- Periodic jobs: which timetable submits which class for which tenant, and up to where that is done.

-- Invariant: every instant up to `position` was submitted or is missed for good. `next_at` is the first one after it, null
-- where a worker of this version has to find it first. `era` is the one in which the position was made: after a restore
-- nobody knows what was submitted meanwhile.
CREATE TABLE fencepost.schedule (
    schedule      text PRIMARY KEY,
    class         text NOT NULL,
    tenant        text NOT NULL,
    timetable     text NOT NULL,
    missed        text NOT NULL CHECK (missed IN ('skip', 'last', 'all')),
    version       integer NOT NULL DEFAULT 1 CHECK (version >= 1),
    era           integer NOT NULL,
    position      timestamptz NOT NULL,
    next_at       timestamptz,
    last_at       timestamptz,
    submitted     bigint NOT NULL DEFAULT 0 CHECK (submitted >= 0),
    missed_count  bigint NOT NULL DEFAULT 0 CHECK (missed_count >= 0),
    seen_at       timestamptz NOT NULL,
    seen_by       text NOT NULL,
    registered_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (next_at > position)
) WITH (fillfactor = 50);

-- Jobs that stand still until somebody or something else moves them: in any state but queued, running and done. They are few
-- among many that are done, and what changes in a job is in no index.
CREATE TABLE fencepost.job_hold (
    tenant    text NOT NULL,
    operation text NOT NULL,
    class     text NOT NULL,
    state     text NOT NULL,
    since     timestamptz NOT NULL,
    PRIMARY KEY (tenant, operation, class)
);
CREATE INDEX job_hold_state ON fencepost.job_hold (state, since);
INSERT INTO fencepost.job_hold (tenant, operation, class, state, since)
SELECT j.tenant, j.operation, j.class, j.exec, j.changed_at FROM fencepost.job AS j WHERE j.exec NOT IN ('queued', 'running', 'done');

-- What became of jobs, but for claims and completions, which `attempt` and the job itself tell.
CREATE TABLE fencepost.job_event (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant     text NOT NULL,
    operation  text NOT NULL,
    class      text NOT NULL,
    generation bigint NOT NULL,
    attempt    uuid,
    was        text NOT NULL,
    became     text NOT NULL,
    reason     text,
    detail     text NOT NULL,
    login      text NOT NULL DEFAULT session_user,
    at         timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX job_event_job ON fencepost.job_event (tenant, operation, class);
CREATE INDEX decision_job ON fencepost.decision (tenant, operation, subject) WHERE kind IN ('cancel', 'requeue');
