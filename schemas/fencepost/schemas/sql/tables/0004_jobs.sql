-- Scheduling, publication and effects. Three axes that are never one status: execution, effect, authority.

CREATE TABLE fencepost.job_class (
    class              text PRIMARY KEY,
    policy             text NOT NULL CHECK (policy IN ('strict', 'resumable')),
    lease              interval NOT NULL CHECK (lease > interval '0'),
    max_attempts       integer NOT NULL CHECK (max_attempts >= 1),
    max_finishes       integer NOT NULL CHECK (max_finishes >= 1),
    backoff_base       interval NOT NULL CHECK (backoff_base >= interval '0'),
    backoff_max        interval NOT NULL CHECK (backoff_max >= backoff_base),
    max_effect_timeout interval NOT NULL CHECK (max_effect_timeout > interval '0'),
    network_bound      interval NOT NULL CHECK (network_bound >= interval '0'),
    queue              text NOT NULL DEFAULT 'default',
    job_limit          integer CHECK (job_limit >= 1),
    tenant_limit       integer CHECK (tenant_limit >= 1),
    fair               boolean NOT NULL DEFAULT false,
    registered_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Who runs is counted where there is a limit, and a limit of each tenant is kept by serving them in turn.
    CHECK (tenant_limit IS NULL OR job_limit IS NOT NULL AND fair)
);

-- Invariant: generation never decreases; running exactly when attempt, owner and lease_until are all set.
-- What changes here is in no index, so that a claim, a renewal and a completion write one row and nothing else; where to
-- look for work is in the agenda.
CREATE TABLE fencepost.job (
    tenant          text NOT NULL,
    operation       text NOT NULL,
    class           text NOT NULL,
    args            bytea NOT NULL,
    meaning         bytea NOT NULL CHECK (octet_length(meaning) = 33),
    digest          bytea NOT NULL CHECK (octet_length(digest) = 33),
    accepted_epoch  bigint NOT NULL,
    epoch           bigint NOT NULL,
    source_event    uuid,
    priority        integer NOT NULL DEFAULT 0,
    run_at          timestamptz NOT NULL,
    exec            text NOT NULL DEFAULT 'queued'
                    CHECK (exec IN ('queued', 'running', 'waiting', 'done', 'cancelled', 'poison', 'blocked')),
    mode            text NOT NULL DEFAULT 'execute' CHECK (mode IN ('execute', 'finish')),
    generation      bigint NOT NULL DEFAULT 0 CHECK (generation >= 0),
    attempts        integer NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    finishes        integer NOT NULL DEFAULT 0 CHECK (finishes >= 0),
    attempt         uuid,
    owner           text,
    lease_until     timestamptz,
    done_attempt    uuid,
    open_effects    integer NOT NULL DEFAULT 0 CHECK (open_effects >= 0),
    applied_effects integer NOT NULL DEFAULT 0 CHECK (applied_effects >= 0),
    reason          text,
    detail          text NOT NULL DEFAULT '',
    submitted_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, operation, class),
    CHECK ((exec = 'running') = (attempt IS NOT NULL)),
    CHECK ((exec = 'running') = (owner IS NOT NULL)),
    CHECK ((exec = 'running') = (lease_until IS NOT NULL)),
    CHECK ((exec = 'done') = (done_attempt IS NOT NULL)),
    CHECK (exec <> 'done' OR open_effects = 0)
) WITH (fillfactor = 50);

-- Which job to look at, and from when on; whether it may then be claimed, only its own row decides. Rows are inserted and
-- deleted; nothing but `fair_class` is ever changed. The priority is the priority of a queued job, 2147483647 for the lease
-- of a running one, or 2147483646 for what may wake a waiting one.
-- Invariant: `due` is never before the insert, so what is behind a mark (see marks) is gone for good.
CREATE TABLE fencepost.agenda (
    class      text NOT NULL,
    priority       integer NOT NULL,
    due        timestamptz NOT NULL,
    tenant     text NOT NULL,
    operation  text NOT NULL,
    generation bigint NOT NULL,
    epoch      bigint NOT NULL,
    -- The class once more, of queued jobs in a class that is fair: this index can be used for nothing else, and no other for it.
    fair_class text
    -- It is empty again and again: giving its pages back would lock everybody out each time.
) WITH (vacuum_truncate = false);
CREATE INDEX agenda_due ON fencepost.agenda (class, priority, due);
-- Queued jobs of classes whose tenants are served in turn.
CREATE INDEX agenda_fair ON fencepost.agenda (fair_class, priority, tenant, due) WHERE fair_class IS NOT NULL;

-- Every claim that ever was: which attempt, of which owner, in which mode. Written by claim only, under the job's lock:
-- a foreign key would cost more than the row.
CREATE TABLE fencepost.attempt (
    tenant     text NOT NULL,
    attempt    uuid NOT NULL,
    operation  text NOT NULL,
    class      text NOT NULL,
    generation bigint NOT NULL,
    owner      text NOT NULL,
    epoch      bigint NOT NULL,
    mode       text NOT NULL,
    claimed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, attempt)
);

-- Immutable candidates: what an attempt computed, for its successor to publish under its own fence.
CREATE TABLE fencepost.staged (
    tenant     text NOT NULL,
    operation  text NOT NULL,
    class      text NOT NULL,
    attempt    uuid NOT NULL,
    n          bigint GENERATED ALWAYS AS IDENTITY,
    result     bytea NOT NULL,
    staged_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, operation, class, attempt),
    FOREIGN KEY (tenant, attempt) REFERENCES fencepost.attempt ON DELETE RESTRICT
);

-- Audit of every fenced transaction, and the row whose deferred trigger checks the fence once more at commit.
CREATE TABLE fencepost.publication (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant      text NOT NULL,
    operation   text NOT NULL,
    class       text NOT NULL,
    generation  bigint NOT NULL,
    attempt     uuid NOT NULL,
    owner       text NOT NULL,
    epoch       bigint NOT NULL,
    lease_until timestamptz NOT NULL,
    xid         xid8 NOT NULL DEFAULT pg_current_xact_id(),
    at          timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX publication_job ON fencepost.publication (tenant, operation, class);

CREATE TABLE fencepost.effect (
    tenant            text NOT NULL,
    operation         text NOT NULL,
    effect_key        text NOT NULL,
    class             text NOT NULL,
    kind              text NOT NULL CHECK (kind IN ('keyed', 'lookup', 'opaque')),
    state             text NOT NULL CHECK (state IN ('pending', 'success', 'failed_before_dispatch', 'unknown',
                        'resolved_applied', 'resolved_not_applied')),
    effect_attempt    uuid,
    begun_by          uuid NOT NULL,
    request_digest    bytea NOT NULL CHECK (octet_length(request_digest) = 32),
    dispatch_deadline timestamptz NOT NULL,
    quiescent_at      timestamptz NOT NULL,
    receipt           text,
    result            bytea,
    decision_id       uuid,
    contradicted      boolean NOT NULL DEFAULT false,
    reason            text,
    assignee          text NOT NULL DEFAULT 'operator',
    version           integer NOT NULL DEFAULT 1,
    begins            integer NOT NULL DEFAULT 1,
    begun_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, operation, effect_key),
    FOREIGN KEY (tenant, operation, class) REFERENCES fencepost.job ON DELETE RESTRICT,
    CHECK (state NOT IN ('success', 'resolved_applied') OR receipt IS NOT NULL),
    CHECK (state NOT IN ('resolved_applied', 'resolved_not_applied') OR decision_id IS NOT NULL)
);
CREATE INDEX effect_open ON fencepost.effect (state, changed_at) WHERE state IN ('pending', 'unknown');

CREATE TABLE fencepost.effect_event (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant         text NOT NULL,
    operation      text NOT NULL,
    effect_key     text NOT NULL,
    effect_attempt uuid,
    was            text,
    became         text NOT NULL,
    receipt        text,
    reason         text,
    version        integer NOT NULL,
    login          text NOT NULL DEFAULT session_user,
    at             timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX effect_event_effect ON fencepost.effect_event (tenant, operation, effect_key);
