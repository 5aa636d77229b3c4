CREATE SCHEMA fencepost;

CREATE TABLE IF NOT EXISTS fencepost.migration (
    name text PRIMARY KEY, checksum text NOT NULL, applied_at timestamptz NOT NULL DEFAULT clock_timestamp());

-- 0001_authority.sql
-- Authority: who may act. The gate is only ever locked; the ticket proves that this database was armed as it runs now.

CREATE TABLE fencepost.gate ();
COMMENT ON TABLE fencepost.gate IS
  'Locked ROW SHARE by every use of authority, EXCLUSIVE by every change of it; holds no rows.';

CREATE TABLE fencepost.installation (
    singleton     boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    id            uuid NOT NULL,
    name          text NOT NULL CHECK (name ~ '^[a-z][a-z0-9_]{0,20}$'),
    slots         integer NOT NULL CHECK (slots BETWEEN 1 AND 1024),
    epoch_counter bigint NOT NULL DEFAULT 1 CHECK (epoch_counter >= 1),
    floor         bigint NOT NULL DEFAULT 1 CHECK (floor >= 1),
    era           integer NOT NULL DEFAULT 1 CHECK (era >= 1),
    outbox_child  smallint NOT NULL DEFAULT 0 CHECK (outbox_child BETWEEN 0 AND 2),
    ack_child     smallint NOT NULL DEFAULT 0 CHECK (ack_child BETWEEN 0 AND 1),
    single_role   boolean NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (floor <= epoch_counter)
);

-- A tenant without a row stands at the floor: a first enqueue never waits for another tenant's, or its own, first one.
CREATE TABLE fencepost.tenant (
    tenant     text PRIMARY KEY,
    epoch      bigint NOT NULL CHECK (epoch >= 1),
    frozen     boolean NOT NULL DEFAULT false,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Invariant: valid only while its own xmin is the recorded xid, the server was not restarted and the database is the same.
CREATE TABLE fencepost.ticket (
    singleton         boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    xid               xid8 NOT NULL,
    postmaster_start  timestamptz NOT NULL,
    database_oid      oid NOT NULL,
    table_oid         oid NOT NULL,
    system_identifier bigint NOT NULL,
    timeline          bigint NOT NULL,
    nonce             uuid NOT NULL,
    armed_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    armed_by          text NOT NULL DEFAULT session_user
);

-- The tip is the database's half of the witness: arm compares it with the half that lives outside.
CREATE TABLE fencepost.tip (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    seq       bigint NOT NULL,
    nonce     uuid NOT NULL,
    beat_at   timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 20);

CREATE TABLE fencepost.authority_log (
    seq      bigint PRIMARY KEY,
    kind     text NOT NULL CHECK (kind IN ('created', 'armed')),
    actor    text NOT NULL DEFAULT session_user,
    detail   jsonb NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    previous bytea NOT NULL,
    hash     bytea NOT NULL CHECK (octet_length(hash) = 32)
);

CREATE TABLE fencepost.duty (
    name        text PRIMARY KEY,
    owner       uuid NOT NULL,
    lease_until timestamptz NOT NULL
) WITH (fillfactor = 20);

-- Operators' acts, append-only: who decided what, with which reason and evidence.
CREATE TABLE fencepost.decision (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    decision_id   uuid NOT NULL UNIQUE,
    kind          text NOT NULL CHECK (kind IN ('reconcile', 'cancel', 'requeue', 'routes', 'retention')),
    actor         text NOT NULL,
    reason        text NOT NULL,
    tenant        text,
    operation     text,
    subject       text NOT NULL,
    verdict       text NOT NULL,
    evidence_kind text,
    evidence_ref  text,
    login         text NOT NULL DEFAULT session_user,
    at            timestamptz NOT NULL DEFAULT clock_timestamp()
);


INSERT INTO fencepost.migration (name, checksum) VALUES ('0001_authority.sql', '5a0544cb3e2b4f72bea4a7dab59de626d18b7cd82f9ac7f8474e103b3772dfa8');

-- 0002_outbox.sql
-- Delivery: the append-only outbox, its ticks, the acks of every destination, and what a relay set aside.

CREATE SEQUENCE fencepost.outbox_seq AS bigint CACHE 1;
CREATE SEQUENCE fencepost.ack_seq AS bigint CACHE 1;

-- Identity of an event at acceptance. Its lifetime is the replay window, independent of the outbox row's.
CREATE TABLE fencepost.event_key (
    tenant      text NOT NULL,
    operation   text NOT NULL,
    type        text NOT NULL,
    event_id    uuid NOT NULL,
    meaning     bytea NOT NULL CHECK (octet_length(meaning) = 33),
    recorded_at timestamptz NOT NULL,
    PRIMARY KEY (tenant, operation, type)
);

-- Invariant: rows are never updated; xid (top level) was assigned before seq was drawn.
CREATE TABLE fencepost.outbox (
    child        smallint NOT NULL,
    slot         integer NOT NULL,
    seq          bigint NOT NULL,
    xid          xid8 NOT NULL,
    era          integer NOT NULL,
    event_id     uuid NOT NULL,
    tenant       text NOT NULL,
    operation    text NOT NULL,
    type         text NOT NULL,
    version      integer NOT NULL,
    epoch        bigint NOT NULL,
    ordering_key text NOT NULL,
    digest       bytea NOT NULL CHECK (octet_length(digest) = 33),
    recorded_at  timestamptz NOT NULL,
    content_type text NOT NULL,
    attributes   jsonb,
    reference    text CHECK (reference LIKE 'ref:%'),
    payload      bytea NOT NULL
) PARTITION BY LIST (child);
CREATE TABLE fencepost.outbox_0 PARTITION OF fencepost.outbox FOR VALUES IN (0);
CREATE TABLE fencepost.outbox_1 PARTITION OF fencepost.outbox FOR VALUES IN (1);
CREATE TABLE fencepost.outbox_2 PARTITION OF fencepost.outbox FOR VALUES IN (2);
CREATE INDEX outbox_slot_seq ON fencepost.outbox (slot, seq);
CREATE INDEX outbox_xid ON fencepost.outbox (xid);
ALTER TABLE fencepost.outbox_0 ALTER COLUMN payload SET STORAGE EXTERNAL;
ALTER TABLE fencepost.outbox_1 ALTER COLUMN payload SET STORAGE EXTERNAL;
ALTER TABLE fencepost.outbox_2 ALTER COLUMN payload SET STORAGE EXTERNAL;

-- Locked EXCLUSIVE while a tick is taken (a mode that assigns no transaction id); holds no rows.
CREATE TABLE fencepost.tick_gate ();

CREATE TABLE fencepost.tick (
    era      integer NOT NULL,
    n        bigint NOT NULL,
    snap     pg_snapshot NOT NULL,
    hint     bigint NOT NULL,
    next     xid8 NOT NULL,
    snap_xmax xid8 NOT NULL,
    snap_xip  xid8[] NOT NULL,
    taken_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (era, n)
);

CREATE TABLE fencepost.destination (
    destination   text PRIMARY KEY CHECK (destination = '-' OR destination ~ '^[a-z][a-z0-9_-]{0,40}$'),
    kind          text NOT NULL CHECK (kind IN ('none', 'kafka', 'rabbitmq')),
    routes        jsonb NOT NULL,
    routes_digest bytea NOT NULL CHECK (octet_length(routes_digest) = 32),
    start_era     integer NOT NULL,
    start_tick    bigint NOT NULL,
    registered_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row per live relay and destination; its lease covers every slot it owns, so renewing costs one row.
CREATE TABLE fencepost.relay (
    destination text NOT NULL REFERENCES fencepost.destination,
    owner       uuid NOT NULL,
    lease_until timestamptz NOT NULL,
    PRIMARY KEY (destination, owner)
) WITH (fillfactor = 20);

-- Changed only by lease and hand-over.
CREATE TABLE fencepost.slot (
    destination text NOT NULL REFERENCES fencepost.destination,
    slot        integer NOT NULL,
    owner       uuid,
    generation  bigint NOT NULL DEFAULT 0 CHECK (generation >= 0),
    PRIMARY KEY (destination, slot)
) WITH (fillfactor = 50);

-- Appended, read newest first: progress of a slot at a destination.
CREATE TABLE fencepost.ack (
    child       smallint NOT NULL,
    destination text NOT NULL,
    slot        integer NOT NULL,
    n           bigint NOT NULL,
    era         integer NOT NULL,
    acked_tick  bigint NOT NULL,
    end_tick    bigint NOT NULL,
    position    bigint NOT NULL CHECK (position >= 0),
    generation  bigint NOT NULL,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK ((position = 0) = (acked_tick = end_tick))
) PARTITION BY LIST (child);
CREATE TABLE fencepost.ack_0 PARTITION OF fencepost.ack FOR VALUES IN (0);
CREATE TABLE fencepost.ack_1 PARTITION OF fencepost.ack FOR VALUES IN (1);
CREATE INDEX ack_newest ON fencepost.ack (destination, slot, n DESC);

CREATE TABLE fencepost.parked (
    destination  text NOT NULL REFERENCES fencepost.destination,
    slot         integer NOT NULL,
    tenant       text NOT NULL,
    ordering_key text NOT NULL,
    seq          bigint NOT NULL,
    event_id     uuid NOT NULL,
    operation    text NOT NULL,
    type         text NOT NULL,
    version      integer NOT NULL,
    epoch        bigint NOT NULL,
    digest       bytea NOT NULL,
    recorded_at  timestamptz NOT NULL,
    content_type text NOT NULL,
    attributes   jsonb,
    reference    text,
    payload      bytea NOT NULL,
    reason       text NOT NULL CHECK (reason IN ('unroutable', 'no_route', 'no_such_exchange', 'no_such_topic',
                   'too_large', 'not_authorised', 'undecodable', 'unknown_version', 'nacked', 'unanswered',
                   'behind', 'overtaken')),
    detail       text NOT NULL DEFAULT '',
    overtaken_by bigint,
    attempts     integer NOT NULL DEFAULT 1,
    next_try_at  timestamptz,
    parked_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (destination, slot, tenant, ordering_key, seq)
);


INSERT INTO fencepost.migration (name, checksum) VALUES ('0002_outbox.sql', 'f563f513f99f0b3162695898b1ede32e286d7e566e072fd85708dcee283efaf4');

-- 0003_inbox.sql
-- Reservation: one committed handling per tenant, consumer, operation and type. The delivery that it was made with is part of
-- it; every other delivery is kept apart.

-- Coordinates are unique within their broker: a JSON array that names broker, place and message.
CREATE TABLE fencepost.reservation (
    tenant      text NOT NULL,
    consumer    text NOT NULL,
    operation   text NOT NULL,
    type        text NOT NULL,
    version     integer NOT NULL,
    event_id    uuid NOT NULL,
    source      text NOT NULL,
    epoch       bigint NOT NULL,
    meaning     bytea NOT NULL,
    event_time  timestamptz NOT NULL,
    coordinates text NOT NULL,
    arrivals    integer NOT NULL DEFAULT 1,
    reserved_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, consumer, operation, type),
    UNIQUE (consumer, coordinates)
);
COMMENT ON COLUMN fencepost.reservation.arrivals IS 'Of the delivery that it was made with; last_at is the time of the last one.';

-- Deliveries that no reservation was made with: copies of an operation, and what was not handled.
CREATE TABLE fencepost.unreserved_delivery (
    consumer    text NOT NULL,
    coordinates text NOT NULL,
    tenant      text NOT NULL,
    operation   text NOT NULL,
    type        text NOT NULL,
    meaning     bytea NOT NULL,
    event_id    uuid NOT NULL,
    arrivals    integer NOT NULL DEFAULT 1,
    first_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, coordinates)
);

CREATE VIEW fencepost.delivery AS
    SELECT r.consumer, r.coordinates, r.tenant, r.operation, r.type, r.meaning, r.event_id, r.arrivals, r.reserved_at AS first_at,
           r.last_at, false AS unreserved
    FROM fencepost.reservation AS r
    UNION ALL
    SELECT d.consumer, d.coordinates, d.tenant, d.operation, d.type, d.meaning, d.event_id, d.arrivals, d.first_at, d.last_at, true
    FROM fencepost.unreserved_delivery AS d;
COMMENT ON COLUMN fencepost.delivery.unreserved IS
  'No reservation was made with it: it is forgotten by its own time; any other goes with its reservation.';

CREATE TABLE fencepost.dead_letter (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer        text NOT NULL,
    coordinates     text NOT NULL,
    reason          text NOT NULL CHECK (reason IN (
        'conflict', 'delivery_changed', 'undecodable', 'unknown_type', 'newer_version', 'handler_failed')),
    field           text,
    detail          text NOT NULL DEFAULT '',
    tenant          text,
    operation       text,
    type            text,
    version         integer,
    event_id        uuid,
    stored_meaning  bytea,
    arrived_meaning bytea,
    attempts        integer NOT NULL DEFAULT 1,
    headers         jsonb NOT NULL,
    payload         bytea NOT NULL,
    content         bytea NOT NULL CHECK (octet_length(content) = 32),
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (consumer, coordinates, reason, content)
);
COMMENT ON COLUMN fencepost.dead_letter.content IS
  'sha256 over headers and payload: coordinates that a sender reuses never hide one content behind another.';


INSERT INTO fencepost.migration (name, checksum) VALUES ('0003_inbox.sql', '34f9b7d2fe08f9b6ed94fd0f535f6ccc5b2430f6532add650d5a18547f3badba');

-- 0004_jobs.sql
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


INSERT INTO fencepost.migration (name, checksum) VALUES ('0004_jobs.sql', 'b65dcd0c3a0f6129ef3886005ac07b4b98cde65467de9d95d31689af791bc922');

-- 0005_routing.sql
-- Routing and parking: which events each destination answers for, what a refusal does to its key, and operators' acts.

ALTER TABLE fencepost.destination
    ADD COLUMN on_refusal text NOT NULL DEFAULT 'block' CHECK (on_refusal IN ('block', 'pass'));
DROP FUNCTION IF EXISTS fencepost.register_destination(text, text, jsonb, boolean);

-- Invariant: a destination answers for the events whose type matches and whose number is in (since, until]; for ever, so
-- that a change of routes never drops what was accepted before it. What nobody answers for is the reserved `-`'s.
CREATE TABLE fencepost.route (
    destination text NOT NULL REFERENCES fencepost.destination,
    match       text NOT NULL,
    since       bigint NOT NULL CHECK (since >= 0),
    until       bigint CHECK (until > since),
    PRIMARY KEY (destination, match, since)
);
INSERT INTO fencepost.route (destination, match, since)
SELECT DISTINCT d.destination, r ->> 'match', t.hint
FROM fencepost.destination AS d
JOIN fencepost.tick AS t ON t.era = d.start_era AND t.n = d.start_tick
CROSS JOIN LATERAL jsonb_array_elements(d.routes) AS r;

-- Advanced whenever an operator changes parked events of a slot: its owner then looks again which keys wait.
ALTER TABLE fencepost.slot ADD COLUMN acts bigint NOT NULL DEFAULT 0;

CREATE INDEX parked_due ON fencepost.parked (destination, next_try_at) WHERE next_try_at IS NOT NULL;
CREATE UNIQUE INDEX parked_seq ON fencepost.parked (destination, seq);

ALTER TABLE fencepost.decision DROP CONSTRAINT decision_kind_check;
ALTER TABLE fencepost.decision ADD CONSTRAINT decision_kind_check CHECK (kind IN (
    'reconcile', 'cancel', 'requeue', 'routes', 'retention', 'retry_parked', 'skip_parked', 'remove_destination'));


INSERT INTO fencepost.migration (name, checksum) VALUES ('0005_routing.sql', 'c5276af5e6e4405d9d37ff117e480dd0967e7006b3c83da44a54870a8f67cd8e');

-- 0006_recycling.sql
-- Recycling: how long events and their identities are kept, and what is gone.

-- retention: how long published events stay in the outbox, for backfill. replay_window: how long an accepted operation is remembered.
ALTER TABLE fencepost.installation
    ADD COLUMN retention interval NOT NULL DEFAULT '7 days',
    ADD COLUMN replay_window interval NOT NULL DEFAULT '7 days',
    ADD CONSTRAINT installation_retention_check CHECK (retention >= '0' AND replay_window >= retention);

-- Invariant: an event of a child that was closed has a number up to closed_seq and was recorded before closed_at, or its
-- number is above closed_seq (its transaction chose the child before it was closed and wrote after).
CREATE TABLE fencepost.outbox_child (
    child      smallint PRIMARY KEY CHECK (child BETWEEN 0 AND 2),
    opened_at  timestamptz NOT NULL,
    closed_at  timestamptz NOT NULL,
    closed_seq bigint NOT NULL
);
INSERT INTO fencepost.outbox_child (child, opened_at, closed_at, closed_seq)
VALUES (0, '-infinity', '-infinity', 0), (1, '-infinity', '-infinity', 0), (2, '-infinity', '-infinity', 0);

-- Up to where events are gone: numbers above `seq`, events recorded after `recorded_at` and pages that start at `tick` or
-- later are complete.
CREATE TABLE fencepost.recycled (
    singleton   boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    seq         bigint NOT NULL DEFAULT 0,
    recorded_at timestamptz NOT NULL DEFAULT '-infinity',
    era         integer NOT NULL DEFAULT 1,
    tick        bigint NOT NULL DEFAULT 0
);
INSERT INTO fencepost.recycled DEFAULT VALUES;

CREATE INDEX event_key_recorded_at ON fencepost.event_key (recorded_at);
CREATE INDEX parked_event_id ON fencepost.parked (event_id);


INSERT INTO fencepost.migration (name, checksum) VALUES ('0006_recycling.sql', '6892263e2f0be66926c7cbe66474b65f8cc656227721dc4a25e9de6e4f27a705');

-- 0007_overtaken.sql
-- Events that a later one of their key overtook on its way to a broker: where order broke, or may have, it is said.

-- Invariant: written in the commit that records the later one's confirm; kept for the replay window.
CREATE TABLE fencepost.overtaken (
    destination  text NOT NULL REFERENCES fencepost.destination,
    seq          bigint NOT NULL,
    overtaken_by bigint NOT NULL CHECK (overtaken_by <> seq),
    tenant       text NOT NULL,
    ordering_key text NOT NULL,
    operation    text NOT NULL,
    type         text NOT NULL,
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (destination, seq)
);
CREATE INDEX overtaken_at ON fencepost.overtaken (at);


INSERT INTO fencepost.migration (name, checksum) VALUES ('0007_overtaken.sql', 'd0d16b49d0c1f98c2f4c6ffdbb0a923aadcede02d474180a6aa550b89840a948');

-- 0008_doorbell.sql
-- The doorbell: until when (microseconds since 1970) some relay sleeps and wants to be rung; nothing or the past: nobody.
-- Invariant: a sequence, since its value is seen at once and by every snapshot, also one taken before the relay fell asleep.
CREATE SEQUENCE fencepost.doorbell MINVALUE 0 START WITH 0;


INSERT INTO fencepost.migration (name, checksum) VALUES ('0008_doorbell.sql', '48a885bd556cd6342074048ff97ad47950aecddf25a1b4e0758ef834caadb545');

-- 0009_inbox_retention.sql
-- Inbox: how long each consumer remembers, up to where it has forgotten, and dead letters that an operator gives back.

-- replay_window null: nothing is forgotten, which is also what a consumer without a row does.
-- Invariant: the horizon never moves back, and nothing whose event is as young as it was ever forgotten.
CREATE TABLE fencepost.consumer (
    consumer      text PRIMARY KEY,
    replay_window interval CHECK (replay_window > '0'),
    horizon       timestamptz NOT NULL DEFAULT '-infinity',
    changed_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN fencepost.consumer.horizon IS
  'In the time that events carry: the only one that every copy of an event has in common, whenever and wherever it arrives.';

-- Types of irreversible operations: their reservations are never purged. horizon: up to where they may have been, before that.
CREATE TABLE fencepost.consumer_forever (
    consumer text NOT NULL REFERENCES fencepost.consumer,
    type     text NOT NULL,
    horizon  timestamptz NOT NULL,
    PRIMARY KEY (consumer, type)
);

-- How long the broker keeps what this consumer reads, as the broker said at the last start; -1 for ever.
CREATE TABLE fencepost.consumer_topic (
    consumer     text NOT NULL,
    topic        text NOT NULL,
    retention_ms bigint NOT NULL CHECK (retention_ms >= -1),
    noted_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, topic)
);

CREATE INDEX reservation_event_time ON fencepost.reservation (consumer, event_time);
CREATE INDEX unreserved_delivery_first_at ON fencepost.unreserved_delivery (consumer, first_at);

ALTER TABLE fencepost.dead_letter DROP CONSTRAINT dead_letter_reason_check;
ALTER TABLE fencepost.dead_letter ADD CONSTRAINT dead_letter_reason_check CHECK (reason IN (
    'conflict', 'delivery_changed', 'undecodable', 'unknown_type', 'newer_version', 'handler_failed', 'before_horizon', 'old_epoch'));
-- last_at: of several letters of one delivery, the youngest says what it is now. due_at: when the consumer takes it again.
ALTER TABLE fencepost.dead_letter
    ADD COLUMN last_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    ADD COLUMN due_at timestamptz,
    ADD COLUMN takes integer NOT NULL DEFAULT 0,
    ADD COLUMN unhandled boolean NOT NULL DEFAULT false,
    ADD COLUMN released_epoch bigint;
COMMENT ON COLUMN fencepost.dead_letter.unhandled IS
  'An operator has said that this event was not handled before its history was purged: it may be handled, although it is old.';
COMMENT ON COLUMN fencepost.dead_letter.released_epoch IS
  'The epoch that its tenant stood at when an authority admin released it: it may be handled under that one, although it is of an older.';
CREATE INDEX dead_letter_due ON fencepost.dead_letter (consumer, due_at) WHERE due_at IS NOT NULL;

ALTER TABLE fencepost.decision DROP CONSTRAINT decision_kind_check;
ALTER TABLE fencepost.decision ADD CONSTRAINT decision_kind_check CHECK (kind IN (
    'reconcile', 'cancel', 'requeue', 'routes', 'retention', 'retry_parked', 'skip_parked', 'remove_destination',
    'retry_dead_letter', 'discard_dead_letter', 'read_dead_letter', 'inbox_retention'));


INSERT INTO fencepost.migration (name, checksum) VALUES ('0009_inbox_retention.sql', 'fd3e3bd560685b2100b102a610ff20e90767a79fc1375e5a6d82326d885a46fc');

-- 0010_inbox_batches.sql
-- Inbox: batches of reservations whose transaction has still to say which of them were handled.

-- Invariant: no row is ever committed; a commit that would leave one is refused.
CREATE TABLE fencepost.inbox_batch (
    transaction xid8 PRIMARY KEY,
    consumer    text NOT NULL,
    reserved    text[] NOT NULL,
    counted     text[] NOT NULL
);
COMMENT ON COLUMN fencepost.inbox_batch.reserved IS 'Coordinates of what was reserved here; counted: of what was known and has arrived again.';


INSERT INTO fencepost.migration (name, checksum) VALUES ('0010_inbox_batches.sql', '4886a5712cff64e590a3547977f31d5c9989790779d14f14ab84a9dce1c60928');

-- 0011_reconciliation.sql
-- Reconciliation: whose an unknown effect is, how urgent it is, when that grows, and when its receipt is looked up again.

-- Invariant: escalate_after grows from step to step; the three arrays say what each step does (to null: it stays with whom it is).
ALTER TABLE fencepost.job_class
    ADD COLUMN assignee text NOT NULL DEFAULT 'operator',
    ADD COLUMN escalate_after interval[] NOT NULL DEFAULT '{1 hour,1 day}',
    ADD COLUMN escalate_severity text[] NOT NULL DEFAULT '{high,critical}',
    ADD COLUMN escalate_to text[] NOT NULL DEFAULT '{NULL,NULL}',
    ADD CONSTRAINT job_class_escalation_check CHECK (
        cardinality(escalate_after) = cardinality(escalate_severity) AND cardinality(escalate_after) = cardinality(escalate_to)
        AND escalate_severity <@ ARRAY['normal', 'high', 'critical']);

-- unknown_since: set exactly while the effect is unknown. escalations: how many steps of its class's policy it has taken.
ALTER TABLE fencepost.effect
    ADD COLUMN severity text NOT NULL DEFAULT 'normal' CHECK (severity IN ('normal', 'high', 'critical')),
    ADD COLUMN unknown_since timestamptz,
    ADD COLUMN escalations integer NOT NULL DEFAULT 0 CHECK (escalations >= 0);
UPDATE fencepost.effect SET unknown_since = changed_at WHERE state = 'unknown';
ALTER TABLE fencepost.effect ADD CONSTRAINT effect_unknown_since_check CHECK ((state = 'unknown') = (unknown_since IS NOT NULL));

-- Set where the event is about whose the effect is, not about what became of it.
ALTER TABLE fencepost.effect_event ADD COLUMN severity text, ADD COLUMN assignee text;

-- What was looked at and the receipt, so that the same decision can be told from another one under its id.
ALTER TABLE fencepost.decision ADD COLUMN version integer, ADD COLUMN receipt text;
ALTER TABLE fencepost.decision DROP CONSTRAINT decision_kind_check;
ALTER TABLE fencepost.decision ADD CONSTRAINT decision_kind_check CHECK (kind IN (
    'reconcile', 'assign', 'cancel', 'requeue', 'routes', 'retention', 'retry_parked', 'skip_parked', 'remove_destination',
    'retry_dead_letter', 'discard_dead_letter', 'read_dead_letter', 'inbox_retention', 'remove_schedule', 'pause', 'resume'));
CREATE INDEX decision_effect ON fencepost.decision (tenant, operation, subject) WHERE kind IN ('reconcile', 'assign');

-- Receipt look-ups of unknown effects: who asks now, or when it is asked again, and what the last answer was.
-- Invariant: one asker at a time; due_at is the end of its lease while it asks, else the time of the next question.
CREATE TABLE fencepost.lookup (
    tenant      text NOT NULL,
    operation   text NOT NULL,
    effect_key  text NOT NULL,
    version     integer NOT NULL,
    taken_by    uuid NOT NULL,
    taken_at    timestamptz NOT NULL,
    due_at      timestamptz NOT NULL,
    asks        integer NOT NULL DEFAULT 1 CHECK (asks >= 1),
    answer      text,
    answered_at timestamptz,
    PRIMARY KEY (tenant, operation, effect_key),
    FOREIGN KEY (tenant, operation, effect_key) REFERENCES fencepost.effect ON DELETE RESTRICT
) WITH (fillfactor = 70);


INSERT INTO fencepost.migration (name, checksum) VALUES ('0011_reconciliation.sql', '4c8295d7cc7ce82248c2f682ae984ddc4479b14dec29e6eec7aa288131e4df29');

-- 0012_protected.sql
-- Users' tables whose rows are written behind a fence only. The table is found by its trigger, so it may be renamed.

CREATE TABLE fencepost.protected (
    id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    relation         text NOT NULL UNIQUE,
    tenant_column    name NOT NULL,
    operation_column name NOT NULL,
    protected_by     text NOT NULL DEFAULT session_user,
    protected_at     timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN fencepost.protected.relation IS
  'The name at the time: where the trigger is gone, it tells which table has lost it.';

-- Content of object stores that is referenced, or whose removal as an orphan is under way; whoever comes second waits here.
CREATE TABLE fencepost.object (
    store        text NOT NULL,
    object       text NOT NULL CHECK (object ~ '^[0-9a-f]{64}$'),
    condemned_at timestamptz,
    PRIMARY KEY (store, object)
);

-- What an operation has published outside the database: under which name, as which immutable object.
CREATE TABLE fencepost.manifest (
    tenant       text NOT NULL,
    operation    text NOT NULL,
    name         text NOT NULL,
    store        text NOT NULL,
    object       text NOT NULL,
    size         bigint NOT NULL CHECK (size >= 0),
    published_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, operation, name),
    FOREIGN KEY (store, object) REFERENCES fencepost.object ON DELETE RESTRICT
);
CREATE INDEX manifest_object ON fencepost.manifest (store, object);


INSERT INTO fencepost.migration (name, checksum) VALUES ('0012_protected.sql', 'd37f4104f76a231aec5146665b3578389af9529cb05a1c3153c9bfbf529444e7');

-- 0013_waiting.sql
-- What jobs wait for and what they are told, how far they are, and what they returned.

-- One row for each signal that a job has waited for, '' where it waited for a time alone. A waiting job is asleep in the one
-- that has its generation.
-- Invariant: an answer never changes while the job lives: what one run was told, every later run is told. 0 says that the
-- time had come, any other number is a signal's.
CREATE TABLE fencepost.wait (
    tenant     text NOT NULL,
    operation  text NOT NULL,
    class      text NOT NULL,
    signal     text NOT NULL,
    generation bigint NOT NULL,
    until      timestamptz,
    answer     bigint CHECK (answer >= 0),
    began_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, operation, class, signal)
) WITH (fillfactor = 70);

-- What somebody told a job, in a transaction of theirs. No foreign key: it would lock the job.
CREATE TABLE fencepost.signal (
    n         bigint GENERATED ALWAYS AS IDENTITY,
    tenant    text NOT NULL,
    operation text NOT NULL,
    class     text NOT NULL,
    name      text NOT NULL CHECK (name <> ''),
    key       text,
    payload   bytea NOT NULL CHECK (octet_length(payload) <= 65536),
    actor     text,
    login     text NOT NULL DEFAULT session_user,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, operation, class, name, n)
);
CREATE UNIQUE INDEX signal_key ON fencepost.signal (tenant, operation, class, key) WHERE key IS NOT NULL;

-- How far the newest attempt that said so is. What changes is in no index.
CREATE TABLE fencepost.progress (
    tenant    text NOT NULL,
    operation text NOT NULL,
    class     text NOT NULL,
    attempt   uuid NOT NULL,
    fraction  double precision NOT NULL CHECK (fraction BETWEEN 0 AND 1),
    note      text NOT NULL DEFAULT '',
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, operation, class)
) WITH (fillfactor = 50);

-- What the attempt that completed a job returned, where it returned something.
CREATE TABLE fencepost.result (
    tenant    text NOT NULL,
    operation text NOT NULL,
    class     text NOT NULL,
    attempt   uuid NOT NULL,
    result    bytea NOT NULL CHECK (octet_length(result) <= 65536),
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, operation, class)
);


INSERT INTO fencepost.migration (name, checksum) VALUES ('0013_waiting.sql', '9d1c8ef9f464977e2ce285e69d1d541e6e2016bc9dad04bad4b9babedc6a579a');

-- 0014_queues.sql
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


INSERT INTO fencepost.migration (name, checksum) VALUES ('0014_queues.sql', 'b8ede380f52eab00f370c0d5886f426ee8a925d74b4258c01ce95d43d2e94b51');

-- 0015_schedules_and_holds.sql
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


INSERT INTO fencepost.migration (name, checksum) VALUES ('0015_schedules_and_holds.sql', '2a2657ef8ad3f085edc98a6825c957227a3aabaae56d566db4927df0da514d9a');

-- 0017_authority.sql
-- Changes of authority: rotation, freeze, restriction, release, seal and recovery, in one hash-chained history.

-- frozen: nobody begins an effect. recovered_at: what was accepted before it may have been worked on in what a restore lost.
ALTER TABLE fencepost.installation
    ADD COLUMN frozen boolean NOT NULL DEFAULT false,
    ADD COLUMN recovered_at timestamptz;

-- claimable: the epoch that work must stand at to be claimed; none does while the tenant is suspended.
ALTER TABLE fencepost.tenant
    ADD COLUMN suspended boolean NOT NULL DEFAULT false,
    ADD COLUMN claimable bigint GENERATED ALWAYS AS (CASE WHEN suspended THEN 9223372036854775807 ELSE epoch END) STORED;

-- held: taken away by a rotation or a recovery. suspect: a restore made it doubtful which effects it has begun, so it begins
-- none that was not reconciled; quiescent_at: no call that was lost by the restore can be under way after it.
ALTER TABLE fencepost.job
    ADD COLUMN suspect boolean NOT NULL DEFAULT false,
    ADD COLUMN quiescent_at timestamptz,
    DROP CONSTRAINT job_exec_check;
ALTER TABLE fencepost.job
    ADD CONSTRAINT job_exec_check CHECK (exec IN ('queued', 'running', 'waiting', 'done', 'cancelled', 'poison', 'blocked', 'held')),
    ADD CONSTRAINT job_suspect_check CHECK (NOT suspect OR quiescent_at IS NOT NULL);

-- An effect that a suspect job's operator settled, and of which this database knows nothing, has no attempt and no request.
ALTER TABLE fencepost.effect
    ALTER COLUMN begun_by DROP NOT NULL,
    ALTER COLUMN request_digest DROP NOT NULL;

-- Begins of jobs that a restore lost, out of the runners' journals: submitted again, such a job is suspect.
CREATE TABLE fencepost.lost_begin (
    tenant         text NOT NULL,
    operation      text NOT NULL,
    class          text NOT NULL,
    effect_key     text NOT NULL,
    effect_attempt uuid NOT NULL,
    found_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, operation, class, effect_key, effect_attempt)
);

CREATE TABLE fencepost.restriction (
    kind    text NOT NULL CHECK (kind IN ('tenant', 'class', 'principal')),
    subject text NOT NULL,
    reason  text NOT NULL,
    since   timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (kind, subject)
);

-- Who acts without a job. login: whose sessions alone may act as it; null: of any login that may ask.
CREATE TABLE fencepost.principal (
    principal text PRIMARY KEY,
    login     text,
    since     timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- tenant, class: * is every one. epoch: the newest that anybody had when it was granted; a tenant that got a newer one since,
-- by rotation or recovery, is not covered any more.
CREATE TABLE fencepost.principal_grant (
    principal text NOT NULL REFERENCES fencepost.principal,
    tenant    text NOT NULL,
    class     text NOT NULL,
    epoch     bigint NOT NULL,
    since     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (principal, tenant, class)
);

-- sealed_start: when the server was started on which the seal was written; a seal is broken by arming elsewhere or on purpose.
ALTER TABLE fencepost.tip ADD COLUMN sealed_start timestamptz;

ALTER TABLE fencepost.authority_log DROP CONSTRAINT authority_log_kind_check;
ALTER TABLE fencepost.authority_log ADD CONSTRAINT authority_log_kind_check CHECK (kind IN (
    'created', 'armed', 'rotated', 'frozen', 'thawed', 'restricted', 'lifted', 'released', 'sealed', 'recovered'));


INSERT INTO fencepost.migration (name, checksum) VALUES ('0017_authority.sql', '95b761de5773d0340dd8487e22742ebd5176d847f71a7c975069c1070544cc44');

-- 0018_job_doorbell.sql
-- The doorbell of jobs: until when (microseconds since 1970) some worker sleeps and wants to be rung; nothing or the past: nobody.
-- Invariant: a sequence, since its value is seen at once and by every snapshot, also one taken before the worker fell asleep.
CREATE SEQUENCE fencepost.job_doorbell MINVALUE 0 START WITH 0;


INSERT INTO fencepost.migration (name, checksum) VALUES ('0018_job_doorbell.sql', 'ad12cd380fee5e159fdd56b4fc49877d41f196712f7a7c765ddd30aa279abce8');

-- 0019_lifecycle.sql
-- One owner of the lifecycle of each class: who claims, retries, reaps and completes its jobs. 'fencepost' where there is no row.
CREATE TABLE fencepost.lifecycle (
    class          text PRIMARY KEY,
    implementation text NOT NULL CHECK (implementation <> 'fencepost'),
    since          timestamptz NOT NULL DEFAULT clock_timestamp()
);

ALTER TABLE fencepost.authority_log DROP CONSTRAINT authority_log_kind_check;
ALTER TABLE fencepost.authority_log ADD CONSTRAINT authority_log_kind_check CHECK (kind IN (
    'created', 'armed', 'rotated', 'frozen', 'thawed', 'restricted', 'lifted', 'released', 'sealed', 'recovered', 'handed_over',
    'registered', 'granted', 'revoked'));

ALTER TABLE fencepost.decision DROP CONSTRAINT decision_kind_check;
ALTER TABLE fencepost.decision ADD CONSTRAINT decision_kind_check CHECK (kind IN (
    'reconcile', 'assign', 'cancel', 'requeue', 'routes', 'retention', 'retry_parked', 'skip_parked', 'remove_destination',
    'retry_dead_letter', 'discard_dead_letter', 'read_dead_letter', 'inbox_retention', 'remove_schedule', 'pause', 'resume',
    'take_over', 'give_back', 'release_dead_letter'));


INSERT INTO fencepost.migration (name, checksum) VALUES ('0019_lifecycle.sql', '14a75f962abd95dbe6107927be5fd3ce5e0f26bbb974a8ca70e0889bf5db2df8');

-- 0020_positions.sql
-- Positions: how far consumers have read, as this database knows it, so that a restored one is given again what it lost.

-- recovered_epoch: the epoch of the last recovery, 0 before the first. Epochs are given once, so no two recoveries share it.
ALTER TABLE fencepost.installation ADD COLUMN recovered_epoch bigint NOT NULL DEFAULT 0;

-- Invariant: everything below next is committed in this database. Written after the work and before the broker is told, so that
-- a broker that knows more says that this database has lost it.
CREATE TABLE fencepost.consumer_position (
    consumer       text NOT NULL,
    cluster        text NOT NULL,
    consumer_group text NOT NULL,
    topic          text NOT NULL,
    topic_id       text NOT NULL,
    partition      integer NOT NULL,
    next           bigint NOT NULL CHECK (next >= 0),
    noted_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, cluster, consumer_group, topic, topic_id, partition)
) WITH (fillfactor = 50);

-- What each consumer had done when this database was recovered last; positions: so many partitions have one.
CREATE TABLE fencepost.consumer_recovery (
    consumer      text PRIMARY KEY,
    positions     bigint NOT NULL,
    noted_at      timestamptz,
    handled_until timestamptz,
    at            timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON COLUMN fencepost.consumer_recovery.handled_until IS
  'The time of the youngest event that was handled, in the time that events carry.';


INSERT INTO fencepost.migration (name, checksum) VALUES ('0020_positions.sql', '823a4aaac9d167a5adb6758613129f05d0701a495d771607ed5eac13ff929bdb');

-- 0022_archive.sql
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


INSERT INTO fencepost.migration (name, checksum) VALUES ('0022_archive.sql', '593227762bbe9fe33774f011242b7438ea517c877c16a32d13d1c7635de20d03');

SET check_function_bodies = off;

-- authority/arm.sql
-- The timeline of a running primary; the control file lags after a promotion.
CREATE OR REPLACE FUNCTION fencepost._timeline()
RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint
$$;

-- What the keeper of the witness compares before it arms or beats.
-- Tables of one row that were never analysed look large enough to compile the statement, which takes longer than a rotation.
CREATE OR REPLACE FUNCTION fencepost.tip(
    OUT installation uuid, OUT seq bigint, OUT nonce uuid, OUT system_identifier bigint, OUT timeline bigint,
    OUT database_oid bigint, OUT armed boolean, OUT beat_at timestamptz, OUT epoch bigint, OUT sealed boolean)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off AS $$
    SELECT i.id, p.seq, p.nonce, c.system_identifier, fencepost._timeline(),
           (SELECT d.oid::bigint FROM pg_database AS d WHERE d.datname = current_database()), fencepost.armed(), p.beat_at,
           i.epoch_counter, p.sealed_start IS NOT NULL
    FROM fencepost.installation AS i, fencepost.tip AS p, pg_control_system() AS c
$$;

-- Refuses unless the database's tip is what the witness says, on the same system and timeline; a seal on both sides lets it move.
CREATE OR REPLACE FUNCTION fencepost._require_witness(
    p_installation uuid, p_seq bigint, p_nonce uuid, p_system_identifier bigint, p_timeline bigint, p_database_oid bigint,
    p_sealed boolean DEFAULT false)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v record;
    v_moves boolean;
    v_hint constant text := 'an operator must find out what was restored or lost before anything acts again: fencepost doctor';
BEGIN
    PERFORM FROM fencepost.tip FOR UPDATE;
    SELECT * INTO v FROM fencepost.tip();
    v_moves := p_sealed AND v.sealed;
    IF v.installation <> p_installation THEN
        PERFORM fencepost._refuse('ZF002', 'the witness belongs to another installation', 'installation', 'check FENCEPOST_STATE');
    ELSIF v.system_identifier <> p_system_identifier AND NOT v_moves THEN
        PERFORM fencepost._refuse('ZF002', 'the database runs on another system than the witness saw', 'system_identifier', v_hint);
    ELSIF v.database_oid <> p_database_oid AND NOT v_moves THEN
        PERFORM fencepost._refuse('ZF002', 'this is another database than the witness saw: a copy or a restore', 'database', v_hint);
    ELSIF v.timeline <> p_timeline AND NOT v_moves THEN
        PERFORM fencepost._refuse('ZF002', 'the database runs on another timeline than the witness saw', 'timeline', v_hint);
    ELSIF v.seq < p_seq THEN
        PERFORM fencepost._refuse('ZF002', 'the database is behind its witness: it was restored from an older copy', 'behind', v_hint);
    ELSIF v.seq > p_seq THEN
        PERFORM fencepost._refuse('ZF002', 'the database is ahead of its witness: the witness is stale', 'ahead', v_hint);
    ELSIF v.nonce <> p_nonce THEN
        PERFORM fencepost._refuse('ZF002', 'database and witness took different turns', 'nonce', v_hint);
    END IF;
END $$;

-- Appends to the history of authority. Invariant: every entry's hash covers the one before it.
-- Locks: the history, so that entries are made one after the other.
CREATE OR REPLACE FUNCTION fencepost._log_authority(p_kind text, p_detail jsonb)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_seq bigint;
    v_previous bytea;
BEGIN
    LOCK TABLE fencepost.authority_log IN SHARE ROW EXCLUSIVE MODE;
    SELECT l.seq, l.hash INTO v_seq, v_previous FROM fencepost.authority_log AS l ORDER BY l.seq DESC LIMIT 1;
    v_seq := coalesce(v_seq, 0) + 1;
    v_previous := coalesce(v_previous, ''::bytea);
    INSERT INTO fencepost.authority_log (seq, kind, detail, previous, hash)
    VALUES (v_seq, p_kind, p_detail, v_previous, fencepost._authority_hash(v_previous, v_seq, p_kind, session_user, p_detail));
END $$;

CREATE OR REPLACE FUNCTION fencepost._authority_hash(p_previous bytea, p_seq bigint, p_kind text, p_actor text, p_detail jsonb)
RETURNS bytea LANGUAGE sql STABLE AS $$
    SELECT sha256(p_previous || convert_to(p_seq || ' ' || p_kind || ' ' || p_actor || ' ' || p_detail::text, 'UTF8'))
$$;

-- The last part of every way to become armed: the next turn as the tip, and a ticket of this very transaction.
CREATE OR REPLACE FUNCTION fencepost._take_turn(p_next_seq bigint, p_next_nonce uuid)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fencepost.tip SET seq = p_next_seq, nonce = p_next_nonce, beat_at = clock_timestamp(), sealed_start = NULL;
    DELETE FROM fencepost.ticket;
    INSERT INTO fencepost.ticket (xid, postmaster_start, database_oid, table_oid, system_identifier, timeline, nonce)
    SELECT pg_current_xact_id(), pg_postmaster_start_time(), d.oid, 'fencepost.ticket'::regclass::oid,
           c.system_identifier, fencepost._timeline(), p_next_nonce
    FROM pg_database AS d, pg_control_system() AS c WHERE d.datname = current_database();
    IF NOT fencepost.armed() THEN
        PERFORM fencepost._refuse('ZF004', 'it was called inside a subtransaction', 'subtransaction', 'call it as a transaction of its own');
    END IF;
END $$;

CREATE OR REPLACE FUNCTION fencepost._require_next(p_seq bigint, p_nonce uuid, p_next_seq bigint, p_next_nonce uuid)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF (p_next_seq = p_seq + 1 AND p_next_nonce <> p_nonce) IS NOT TRUE THEN
        PERFORM fencepost._refuse('ZF003', 'next must follow the tip by one under a new nonce', 'next', NULL);
    END IF;
END $$;

-- Arms this database: only by equality with the witness, never inside a subtransaction. A rotation or a restriction that the
-- witness was told of and this database was not is made now. A sealed database stays disarmed where the seal was written, until
-- it is restarted, moved, or armed on purpose (`p_unseal`).
-- Locks: gate EXCLUSIVE (waits at most five seconds for those who use authority now).
CREATE OR REPLACE FUNCTION fencepost.arm(
    p_installation uuid, p_seq bigint, p_nonce uuid, p_next_seq bigint, p_next_nonce uuid,
    p_system_identifier bigint, p_timeline bigint, p_database_oid bigint,
    p_epoch bigint, p_tenant text, p_restrictions text[], p_sealed boolean, p_unseal boolean)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_counter bigint;
    v_made text[];
BEGIN
    LOCK TABLE fencepost.gate IN EXCLUSIVE MODE;
    PERFORM fencepost._require_login();
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM fencepost._require_witness(p_installation, p_seq, p_nonce, p_system_identifier, p_timeline, p_database_oid, p_sealed);
    PERFORM fencepost._require_next(p_seq, p_nonce, p_next_seq, p_next_nonce);
    IF NOT p_unseal AND EXISTS (SELECT FROM fencepost.tip AS t WHERE t.sealed_start = pg_postmaster_start_time())
       AND EXISTS (SELECT FROM fencepost.tip() AS t WHERE t.system_identifier = p_system_identifier AND t.timeline = p_timeline
                                                      AND t.database_oid = p_database_oid) THEN
        PERFORM fencepost._refuse('ZF002', 'the database is sealed for a planned move', 'sealed',
            'move or restart it, or break the seal: fencepost authority arm');
    END IF;
    SELECT i.epoch_counter INTO STRICT v_counter FROM fencepost.installation AS i;
    IF (p_epoch >= v_counter) IS NOT TRUE THEN
        PERFORM fencepost._refuse('ZF002', 'the witness knows only older epochs than this database', 'epoch',
            'the witness is stale; an operator must decide: fencepost doctor');
    END IF;
    PERFORM fencepost._take_turn(p_next_seq, p_next_nonce);
    PERFORM fencepost._log_authority('armed', jsonb_build_object('seq', p_next_seq, 'nonce', p_next_nonce));
    v_made := fencepost._restrict(p_restrictions, 'the witness says so');
    IF cardinality(v_made) > 0 THEN
        PERFORM fencepost._log_authority('restricted', jsonb_build_object('restrictions', v_made, 'rolled_forward', true));
    END IF;
    IF p_epoch > v_counter THEN
        -- Crash here: [V] the witness was told of a rotation, and its transaction here was lost.
        PERFORM fencepost._rotate(p_tenant, p_epoch);
        PERFORM fencepost._log_authority('rotated', jsonb_build_object('epoch', p_epoch, 'tenant', p_tenant, 'rolled_forward', true));
    END IF;
END $$;

-- One beat of the witness: advances the tip by compare-and-set. A disarmed database does not beat.
CREATE OR REPLACE FUNCTION fencepost.beat(
    p_installation uuid, p_seq bigint, p_nonce uuid, p_next_seq bigint, p_next_nonce uuid,
    p_system_identifier bigint, p_timeline bigint, p_database_oid bigint)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM fencepost._require_witness(p_installation, p_seq, p_nonce, p_system_identifier, p_timeline, p_database_oid);
    PERFORM fencepost._require_next(p_seq, p_nonce, p_next_seq, p_next_nonce);
    UPDATE fencepost.tip SET seq = p_next_seq, nonce = p_next_nonce, beat_at = clock_timestamp();
END $$;

-- One holder at a time for a maintenance duty; true for the holder. The lease is compared by the database clock.
CREATE OR REPLACE FUNCTION fencepost.lease_duty(p_name text, p_owner uuid, p_lease interval)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._require_login();
    INSERT INTO fencepost.duty AS d (name, owner, lease_until) VALUES (p_name, p_owner, clock_timestamp() + p_lease)
    ON CONFLICT (name) DO UPDATE SET owner = p_owner, lease_until = clock_timestamp() + p_lease
        WHERE d.owner = p_owner OR d.lease_until <= clock_timestamp();
    RETURN FOUND;
END $$;


-- authority/contract.sql
-- Which contract this database has, and the oldest code that it still serves: code asks before it does anything.
CREATE OR REPLACE FUNCTION fencepost.contract()
RETURNS TABLE (version integer, serves integer) LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp AS $$
    SELECT 1, 1
$$;


-- authority/digest.sql
-- One part of a digest: its length in four bytes, then the part, in the database's encoding, which is UTF8; no two lists of
-- parts look alike.
CREATE OR REPLACE FUNCTION fencepost._part(p_part text)
RETURNS bytea LANGUAGE sql STABLE STRICT PARALLEL SAFE AS $$
    SELECT int4send(octet_length(p_part)) || convert_to(p_part, 'UTF8')
$$;

-- Same operation, type, version and content: the same meaning, whatever the epoch. The first byte names the algorithm
-- (1 = sha256), the first part the use.
CREATE OR REPLACE FUNCTION fencepost.meaning(p_tenant text, p_operation text, p_type text, p_version integer, p_binding text)
RETURNS bytea LANGUAGE sql STABLE STRICT PARALLEL SAFE AS $$
    SELECT '\x01'::bytea || sha256(
        fencepost._part('fencepost.meaning.v1') || fencepost._part(p_tenant) || fencepost._part(p_operation)
        || fencepost._part(p_type) || fencepost._part(p_version::text) || fencepost._part(p_binding))
$$;

-- The meaning under an epoch.
CREATE OR REPLACE FUNCTION fencepost.digest(
    p_tenant text, p_operation text, p_type text, p_version integer, p_epoch bigint, p_binding text)
RETURNS bytea LANGUAGE sql STABLE STRICT PARALLEL SAFE AS $$
    SELECT '\x01'::bytea || sha256(
        fencepost._part('fencepost.digest.v1') || fencepost._part(p_tenant) || fencepost._part(p_operation)
        || fencepost._part(p_type) || fencepost._part(p_version::text) || fencepost._part(p_epoch::text)
        || fencepost._part(p_binding))
$$;

-- Refuses a content binding that is neither a canonical content hash nor a reference.
CREATE OR REPLACE FUNCTION fencepost._require_binding(p_binding text)
RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_binding IS NULL OR length(p_binding) > 516 OR p_binding !~ '^(jcs-sha256:[0-9a-f]{64}|ref:[^\u0001-\u001f\u007f-\u009f]+)$' THEN
        PERFORM fencepost._refuse('ZF003', 'binding is neither jcs-sha256:<64 hex> nor ref:<reference>', 'binding',
            'compute it from the payload bytes with fencepost.schemas.content.binding');
    END IF;
END $$;


-- authority/enter.sql
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


-- authority/freeze.sql
-- Freezes a tenant, or (null) everybody: no effect begins until the thaw; what runs goes on, records and publishes.
CREATE OR REPLACE FUNCTION fencepost.freeze(p_tenant text, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._set_frozen(p_tenant, true, p_version, p_actor, p_reason, p_evidence);
END $$;

-- Lets effects begin again; unknown ones stay unknown. A tenant's own freeze and everybody's are thawed each for itself.
CREATE OR REPLACE FUNCTION fencepost.thaw(p_tenant text, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._set_frozen(p_tenant, false, p_version, p_actor, p_reason, p_evidence);
END $$;

CREATE OR REPLACE FUNCTION fencepost._set_frozen(
    p_tenant text, p_frozen boolean, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._change(p_version);
    IF p_tenant IS NULL THEN
        UPDATE fencepost.installation SET frozen = p_frozen;
    ELSE
        PERFORM fencepost._require_identity('tenant', p_tenant);
        INSERT INTO fencepost.tenant (tenant, epoch, frozen) VALUES (p_tenant, fencepost._epoch(p_tenant), p_frozen)
        ON CONFLICT (tenant) DO UPDATE SET frozen = p_frozen, changed_at = clock_timestamp();
        PERFORM fencepost._outdate();
    END IF;
    PERFORM fencepost._log_authority(CASE WHEN p_frozen THEN 'frozen' ELSE 'thawed' END, jsonb_build_object(
        'tenant', p_tenant, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
END $$;

-- Whether a tenant's begins are frozen, by its own freeze or by everybody's.
CREATE OR REPLACE FUNCTION fencepost._frozen(p_tenant text)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT i.frozen OR coalesce((SELECT t.frozen FROM fencepost.tenant AS t WHERE t.tenant = p_tenant), false)
    FROM fencepost.installation AS i
$$;


-- authority/holds.sql
-- What does not proceed by itself, whose it is, how much and since when; what `can resume` needs a release and nothing else.
CREATE OR REPLACE FUNCTION fencepost.holds()
RETURNS TABLE (what text, owner text, tenant text, class text, count bigint, oldest timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT 'disarmed', 'authority admin', NULL::text, NULL::text, 1::bigint, NULL::timestamptz WHERE NOT fencepost.armed()
    UNION ALL
    SELECT 'frozen', 'authority admin', NULL, NULL, 1, NULL FROM fencepost.installation AS i WHERE i.frozen
    UNION ALL
    SELECT 'frozen', 'authority admin', t.tenant, NULL, 1, t.changed_at FROM fencepost.tenant AS t WHERE t.frozen
    UNION ALL
    SELECT CASE r.kind WHEN 'tenant' THEN 'suspended' WHEN 'class' THEN 'disabled' ELSE 'revoked: ' || r.subject END, 'authority admin',
           CASE r.kind WHEN 'tenant' THEN r.subject END, CASE r.kind WHEN 'class' THEN r.subject END, 1, r.since
    FROM fencepost.restriction AS r
    UNION ALL
    -- One for every tenant counts here once no tenant is left that it covers.
    SELECT 'grant of an old epoch: ' || g.principal, 'authority admin', g.tenant, g.class, 1, g.since
    FROM fencepost.principal_grant AS g
    CROSS JOIN fencepost.installation AS i LEFT JOIN fencepost.tenant AS t ON t.tenant = g.tenant
    WHERE g.epoch < greatest(i.floor, t.epoch)
    UNION ALL
    (SELECT CASE WHEN j.exec = 'poison' THEN 'poison'
                 WHEN j.suspect AND NOT coalesce(k.policy = 'strict' AND j.applied_effects > 0, false) THEN 'effects suspect'
                 ELSE 'can resume' END AS what,
            CASE WHEN j.exec = 'poison' THEN 'operator'
                 WHEN j.suspect AND NOT coalesce(k.policy = 'strict' AND j.applied_effects > 0, false)
                 THEN coalesce(k.assignee, 'operator') ELSE 'authority admin' END AS owner,
            j.tenant, j.class, count(*), min(j.changed_at)
     FROM fencepost.job AS j
     CROSS JOIN fencepost.installation AS i LEFT JOIN fencepost.tenant AS t ON t.tenant = j.tenant
     LEFT JOIN fencepost.job_class AS k ON k.class = j.class
     WHERE j.exec IN ('held', 'poison') OR j.exec IN ('queued', 'waiting') AND j.epoch <> greatest(i.floor, t.epoch)
     GROUP BY 1, 2, 3, 4)
    UNION ALL
    SELECT 'owned by ' || l.implementation, l.implementation, j.tenant, l.class, count(*), min(j.changed_at)
    FROM fencepost.lifecycle AS l JOIN fencepost.job AS j ON j.class = l.class AND j.exec IN ('queued', 'waiting')
    GROUP BY l.implementation, j.tenant, l.class
    UNION ALL
    SELECT 'effect unknown', e.assignee, e.tenant, e.class, count(*), min(e.unknown_since)
    FROM fencepost.effect AS e WHERE e.state = 'unknown' GROUP BY e.assignee, e.tenant, e.class
    UNION ALL
    SELECT 'event of an old epoch', 'authority admin', d.tenant, NULL, count(*), min(d.created_at)
    FROM fencepost.dead_letter AS d WHERE d.reason = 'old_epoch' AND d.due_at IS NULL GROUP BY d.tenant
    UNION ALL
    SELECT 'begun, and its job is lost', 'operator', b.tenant, b.class, count(*), min(b.found_at)
    FROM fencepost.lost_begin AS b
    -- Submitted again and known by now, it is an effect like any other.
    WHERE NOT EXISTS (SELECT FROM fencepost.effect AS e
                      WHERE e.tenant = b.tenant AND e.operation = b.operation AND e.effect_key = b.effect_key)
    GROUP BY b.tenant, b.class
$$;

-- The first entry of the history whose hash does not follow from the one before it; null when the whole chain holds.
CREATE OR REPLACE FUNCTION fencepost.verify_authority()
RETURNS bigint LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT min(l.seq) FROM (
        SELECT l.seq, l.hash = fencepost._authority_hash(l.previous, l.seq, l.kind, l.actor, l.detail)
               AND l.previous = coalesce(lag(l.hash) OVER (ORDER BY l.seq), ''::bytea)
               AND l.seq = coalesce(lag(l.seq) OVER (ORDER BY l.seq), 0) + 1 AS holds
        FROM fencepost.authority_log AS l) AS l
    WHERE NOT l.holds
$$;


-- authority/principals.sql
-- Registers a principal, or changes the login whose sessions alone may act as it (null: of any login that may ask).
CREATE OR REPLACE FUNCTION fencepost.register_principal(
    p_principal text, p_login text, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._change_principal(p_principal, p_version, p_actor, p_reason);
    IF p_login IS NOT NULL THEN
        PERFORM fencepost._require_identity('login', p_login);
    END IF;
    INSERT INTO fencepost.principal AS p (principal, login) VALUES (p_principal, p_login)
    ON CONFLICT (principal) DO UPDATE SET login = p_login, since = clock_timestamp();
    PERFORM fencepost._log_authority('registered', jsonb_build_object(
        'principal', p_principal, 'login', p_login, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
END $$;

-- Lets a principal act for a tenant on work of a class (*: every one), as long as the tenant's epoch stands. Granted again, it
-- stands under the epoch of now. Returns the newest epoch, which is the last one that it covers.
CREATE OR REPLACE FUNCTION fencepost.grant_principal(
    p_principal text, p_tenant text, p_class text, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_epoch bigint;
BEGIN
    PERFORM fencepost._require_identity('tenant', p_tenant);
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._change_principal(p_principal, p_version, p_actor, p_reason);
    IF NOT EXISTS (SELECT FROM fencepost.principal AS p WHERE p.principal = p_principal) THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such principal', 'principal', 'register it first: fencepost authority principal add');
    END IF;
    SELECT i.epoch_counter INTO STRICT v_epoch FROM fencepost.installation AS i;
    INSERT INTO fencepost.principal_grant (principal, tenant, class, epoch) VALUES (p_principal, p_tenant, p_class, v_epoch)
    ON CONFLICT (principal, tenant, class) DO UPDATE SET epoch = v_epoch, since = clock_timestamp();
    PERFORM fencepost._log_authority('granted', jsonb_build_object('principal', p_principal, 'tenant', p_tenant, 'class', p_class,
        'epoch', v_epoch, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
    RETURN v_epoch;
END $$;

-- Takes grants back: those of this tenant and class, null for whatever it is (* is the grant for every one, and only that).
-- Returns how many there were. No restore gives them back: it puts every tenant under an epoch that no grant covers.
CREATE OR REPLACE FUNCTION fencepost.revoke_principal(
    p_principal text, p_tenant text, p_class text, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_count bigint;
BEGIN
    PERFORM fencepost._change_principal(p_principal, p_version, p_actor, p_reason);
    DELETE FROM fencepost.principal_grant AS g
    WHERE g.principal = p_principal AND g.tenant = coalesce(p_tenant, g.tenant) AND g.class = coalesce(p_class, g.class);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count > 0 THEN
        PERFORM fencepost._log_authority('revoked', jsonb_build_object('principal', p_principal, 'tenant', p_tenant, 'class', p_class,
            'grants', v_count, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
    END IF;
    RETURN v_count;
END $$;

CREATE OR REPLACE FUNCTION fencepost._change_principal(p_principal text, p_version bigint, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fencepost._require_identity('principal', p_principal);
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._change(p_version);
    PERFORM fencepost._outdate();
END $$;


-- authority/recover.sql
-- Brings a restored database back: under an epoch beyond the witness's, frozen, with everything held. What may have been begun
-- in what the restore lost is unknown until there is evidence; every job that is not done is suspect; nobody's lease counts.
-- Refused while the database is armed: there is nothing to recover. The caller has told the witness first.
-- Crash here: [U] until this commits the database is as disarmed as before; after it the witness's intended turn is its tip.
-- Locks: gate EXCLUSIVE, then the outbox and the jobs, so that no acceptance is under way; waits at most five seconds for each.
CREATE OR REPLACE FUNCTION fencepost.recover(
    p_installation uuid, p_next_seq bigint, p_next_nonce uuid, p_epoch bigint, p_restrictions text[], p_numbers bigint,
    p_actor text, p_reason text, p_evidence text,
    OUT epoch bigint, OUT era integer, OUT jobs bigint, OUT unknown bigint, OUT unsent bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM fencepost._refuse('ZF004', 'a recovery needs READ COMMITTED', 'isolation', 'use a read committed transaction');
    ELSIF p_numbers IS NULL OR p_numbers NOT BETWEEN 0 AND 1000000000000 THEN
        PERFORM fencepost._refuse('ZF003', 'numbers is not between 0 and 10^12', 'numbers', NULL);
    END IF;
    LOCK TABLE fencepost.gate IN EXCLUSIVE MODE;
    LOCK TABLE fencepost.outbox, fencepost.job IN SHARE ROW EXCLUSIVE MODE;
    PERFORM fencepost._require_login();
    PERFORM set_config('synchronous_commit', 'on', true);
    IF fencepost.armed() THEN
        PERFORM fencepost._refuse('ZF003', 'the database is armed: there is nothing to recover', 'armed', 'see: fencepost authority status');
    ELSIF p_installation IS DISTINCT FROM (SELECT i.id FROM fencepost.installation AS i) THEN
        PERFORM fencepost._refuse('ZF002', 'the witness belongs to another installation', 'installation', 'check FENCEPOST_STATE');
    ELSIF (p_epoch > (SELECT i.epoch_counter FROM fencepost.installation AS i)) IS NOT TRUE THEN
        PERFORM fencepost._refuse('ZF003', 'the epoch is not beyond this database''s', 'epoch', NULL);
    ELSIF (p_next_seq > (SELECT t.seq FROM fencepost.tip AS t)) IS NOT TRUE THEN
        PERFORM fencepost._refuse('ZF003', 'the turn is not beyond this database''s', 'next', NULL);
    END IF;
    UPDATE fencepost.installation AS i SET epoch_counter = p_epoch, floor = p_epoch, frozen = true, era = i.era + 1,
        recovered_at = clock_timestamp(), recovered_epoch = p_epoch
    RETURNING i.era INTO era;
    epoch := p_epoch;
    unknown := fencepost._doubt_effects();
    jobs := fencepost._doubt_jobs();
    PERFORM fencepost._rebuild_agenda();
    unsent := fencepost._begin_era(era, p_numbers);
    PERFORM fencepost._note_consumers();
    DELETE FROM fencepost.relay;
    DELETE FROM fencepost.duty;
    PERFORM fencepost._take_turn(p_next_seq, p_next_nonce);
    PERFORM fencepost._restrict(p_restrictions, 'the witness says so');
    PERFORM fencepost._log_authority('recovered', jsonb_build_object('epoch', epoch, 'era', era, 'jobs', jobs, 'unknown', unknown,
        'unsent', unsent, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
END $$;

-- Effects of jobs that are not done: pending ones, and those that are said not to have happened, are unknown, for they may
-- have been begun since; attempts are forgotten, and no call counts as over before the longest of its class is.
CREATE OR REPLACE FUNCTION fencepost._doubt_effects()
RETURNS bigint LANGUAGE sql AS $$
    WITH doubted AS (
        UPDATE fencepost.effect AS e SET
            state = CASE WHEN d.doubtful THEN 'unknown' ELSE e.state END,
            version = e.version + CASE WHEN d.doubtful THEN 1 ELSE 0 END,
            reason = CASE WHEN d.doubtful THEN 'recovered' ELSE e.reason END,
            decision_id = CASE WHEN d.doubtful THEN NULL ELSE e.decision_id END,
            changed_at = CASE WHEN d.doubtful THEN clock_timestamp() ELSE e.changed_at END,
            effect_attempt = NULL,
            dispatch_deadline = clock_timestamp() + d.longest, quiescent_at = clock_timestamp() + d.longest
        FROM (SELECT o.tenant, o.operation, o.effect_key, o.state AS was, o.effect_attempt AS attempt,
                     o.state IN ('pending', 'failed_before_dispatch', 'resolved_not_applied') AS doubtful,
                     fencepost._longest_call(o.class) AS longest
              FROM fencepost.effect AS o
              JOIN fencepost.job AS j ON j.tenant = o.tenant AND j.operation = o.operation AND j.class = o.class
              WHERE j.exec <> 'done') AS d
        WHERE e.tenant = d.tenant AND e.operation = d.operation AND e.effect_key = d.effect_key
        RETURNING e.*, d.was, d.attempt, d.doubtful
    ), told AS (
        INSERT INTO fencepost.effect_event (tenant, operation, effect_key, effect_attempt, was, became, receipt, reason, version)
        SELECT d.tenant, d.operation, d.effect_key, d.attempt, d.was, d.state, d.receipt, 'recovered', d.version
        FROM doubted AS d WHERE d.doubtful)
    SELECT count(*) FROM doubted AS d WHERE d.state = 'unknown'
$$;

-- Every job that is not done: taken away from whoever had it, suspect, and blocked, held, or as cancelled or poison as it was.
CREATE OR REPLACE FUNCTION fencepost._doubt_jobs()
RETURNS bigint LANGUAGE sql AS $$
    WITH doubted AS (
        UPDATE fencepost.job AS j SET
            exec = CASE WHEN j.exec IN ('cancelled', 'poison') THEN j.exec WHEN d.open > 0 THEN 'blocked' ELSE 'held' END,
            generation = j.generation + 1, attempt = NULL, owner = NULL, lease_until = NULL,
            open_effects = d.open, applied_effects = d.applied,
            suspect = true, quiescent_at = clock_timestamp() + d.longest,
            reason = CASE WHEN j.exec IN ('cancelled', 'poison') THEN j.reason WHEN d.open > 0 THEN 'effect_unknown' ELSE 'old_epoch' END,
            detail = CASE WHEN j.exec IN ('cancelled', 'poison') THEN j.detail ELSE 'recovered' END, changed_at = clock_timestamp()
        FROM (SELECT o.tenant, o.operation, o.class, fencepost._longest_call(o.class) AS longest,
                     count(e.state) FILTER (WHERE e.state IN ('pending', 'unknown')) AS open,
                     count(e.state) FILTER (WHERE e.state IN ('success', 'resolved_applied')) AS applied
              FROM fencepost.job AS o
              LEFT JOIN fencepost.effect AS e ON e.tenant = o.tenant AND e.operation = o.operation AND e.class = o.class
              WHERE o.exec <> 'done' GROUP BY o.tenant, o.operation, o.class) AS d
        WHERE j.tenant = d.tenant AND j.operation = d.operation AND j.class = d.class
        RETURNING 1)
    SELECT count(*) FROM doubted
$$;

-- The agenda anew from the jobs, whatever was in it.
CREATE OR REPLACE FUNCTION fencepost._rebuild_agenda()
RETURNS void LANGUAGE sql AS $$
    DELETE FROM fencepost.agenda;
    INSERT INTO fencepost.agenda (class, priority, due, tenant, operation, generation, epoch, fair_class)
    SELECT j.class, CASE j.exec WHEN 'queued' THEN j.priority ELSE 2147483647 END,
           greatest(CASE j.exec WHEN 'queued' THEN j.run_at ELSE j.lease_until END, clock_timestamp()),
           j.tenant, j.operation, j.generation, j.epoch,
           CASE j.exec WHEN 'queued' THEN (SELECT k.class FROM fencepost.job_class AS k WHERE k.class = j.class AND k.fair) END
    FROM fencepost.job AS j WHERE j.exec IN ('queued', 'running')
$$;

-- A new era of the outbox: what every slot has not acked is the rest of a page between its first two ticks; slots are free,
-- under new generations. Numbers go on `p_numbers` later, beyond those that were given in what the restore lost.
-- Invariant: no enqueue is under way, and every event that is there is visible to the second tick: transaction ids that this
-- server has not reached yet are another server's, and count as the oldest.
CREATE OR REPLACE FUNCTION fencepost._begin_era(p_era integer, p_numbers bigint)
RETURNS bigint LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_n bigint;
    v_hint bigint;
    v_snap pg_snapshot;
    v_unsent record;
BEGIN
    SELECT array_agg(p.destination) AS destinations, array_agg(p.slot) AS slots, array_agg(p.first) AS firsts,
           coalesce(sum(p.count) FILTER (WHERE p.destination <> '-'), 0) AS count INTO v_unsent
    FROM (
        SELECT s.destination, s.slot, min(o.seq) AS first, count(o.seq) AS count
        FROM fencepost.slot AS s
        JOIN fencepost.destination AS d ON d.destination = s.destination
        LEFT JOIN LATERAL (SELECT k.era, k.acked_tick, k.end_tick, k.position FROM fencepost.ack AS k
                           WHERE k.destination = s.destination AND k.slot = s.slot ORDER BY k.n DESC LIMIT 1) AS a ON true
        LEFT JOIN fencepost.tick AS t ON t.era = coalesce(a.era, d.start_era) AND t.n = coalesce(a.acked_tick, d.start_tick)
        LEFT JOIN fencepost.tick AS e ON e.era = coalesce(a.era, d.start_era) AND e.n = coalesce(a.end_tick, d.start_tick)
        LEFT JOIN LATERAL (
            SELECT m.seq, m.xid FROM fencepost.outbox AS m WHERE m.slot = s.slot AND m.seq > coalesce(t.hint, 0)
            UNION ALL
            SELECT l.seq, l.xid FROM fencepost.outbox AS l
            WHERE l.slot = s.slot AND l.seq <= t.hint
              AND (l.xid = ANY (t.snap_xip) OR l.xid >= t.snap_xmax AND l.xid < t.next)) AS o
          ON NOT (o.seq <= coalesce(a.position, 0) AND coalesce(pg_visible_in_snapshot(o.xid, e.snap), false))
        GROUP BY s.destination, s.slot) AS p;
    -- Sent again with the rest of their slot, in order.
    DELETE FROM fencepost.parked AS p
    USING unnest(v_unsent.destinations, v_unsent.slots, v_unsent.firsts) AS u (destination, slot, first)
    WHERE p.destination = u.destination AND p.slot = u.slot AND p.seq >= u.first;

    SELECT pg_current_snapshot() INTO v_snap;
    UPDATE fencepost.outbox AS o SET xid = '3' WHERE o.xid >= pg_snapshot_xmin(v_snap);
    PERFORM setval('fencepost.outbox_seq', greatest(s.last_value + p_numbers, 1), s.is_called OR p_numbers > 0)
    FROM fencepost.outbox_seq AS s;
    SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END INTO v_hint FROM fencepost.outbox_seq AS s;
    SELECT coalesce(max(t.n), 0) + 1 INTO v_n FROM fencepost.tick AS t;
    DELETE FROM fencepost.tick;
    INSERT INTO fencepost.tick (era, n, snap, hint, next, snap_xmax, snap_xip)
    VALUES (p_era, v_n, '3:3:', 0, '3', '3', '{}'),
           (p_era, v_n + 1, v_snap, v_hint, pg_current_xact_id(), pg_snapshot_xmax(v_snap), ARRAY(SELECT pg_snapshot_xip(v_snap)));
    UPDATE fencepost.destination SET start_era = p_era, start_tick = v_n + 1;
    UPDATE fencepost.slot AS s SET owner = NULL, generation = s.generation + 1;
    INSERT INTO fencepost.ack (child, destination, slot, n, era, acked_tick, end_tick, position, generation)
    SELECT i.ack_child, s.destination, s.slot, nextval('fencepost.ack_seq'), p_era,
           CASE WHEN u.first IS NULL THEN v_n + 1 ELSE v_n END,
           CASE WHEN u.first = 1 THEN v_n ELSE v_n + 1 END,
           CASE WHEN u.first IS NULL THEN 0 ELSE u.first - 1 END, s.generation
    FROM fencepost.slot AS s
    JOIN unnest(v_unsent.destinations, v_unsent.slots, v_unsent.firsts) AS u (destination, slot, first)
      ON u.destination = s.destination AND u.slot = s.slot
    CROSS JOIN fencepost.installation AS i;
    RETURN v_unsent.count;
END $$;

-- Notes a begin of a job that this database does not have, as a runner's journal says; false when it is noted already.
CREATE OR REPLACE FUNCTION fencepost.note_lost_begin(p_tenant text, p_operation text, p_class text, p_effect_key text, p_effect_attempt uuid)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._enter();
    INSERT INTO fencepost.lost_begin (tenant, operation, class, effect_key, effect_attempt)
    VALUES (p_tenant, p_operation, p_class, p_effect_key, p_effect_attempt) ON CONFLICT DO NOTHING;
    RETURN FOUND;
END $$;


-- authority/refuse.sql
-- Raises one typed refusal: an SQLSTATE of class ZF, the field or fence part as COLUMN, what to do as HINT.
CREATE OR REPLACE FUNCTION fencepost._refuse(p_code text, p_message text, p_field text, p_hint text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = p_code, MESSAGE = p_message, COLUMN = coalesce(p_field, ''), HINT = coalesce(p_hint, '');
END $$;

-- Refuses an identity that is null, empty, too long, padded, or holds a control character; names the field.
CREATE OR REPLACE FUNCTION fencepost._require_identity(p_field text, p_value text)
RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_value IS NULL OR p_value = '' THEN
        PERFORM fencepost._refuse('ZF003', p_field || ' is empty', p_field, 'give a value of 1 to 200 characters');
    ELSIF length(p_value) > 200 THEN
        PERFORM fencepost._refuse('ZF003', p_field || ' is longer than 200 characters', p_field, 'give a shorter value');
    ELSIF p_value ~ '[\u0001-\u001f\u007f-\u009f\ufdd0-\ufdef\ufffe\uffff]' THEN
        PERFORM fencepost._refuse('ZF003', p_field || ' holds a control character or a noncharacter', p_field, 'remove it');
    ELSIF p_value ~ '^[ \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]|[ \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]$' THEN
        PERFORM fencepost._refuse('ZF003', p_field || ' begins or ends with white space', p_field, 'trim it');
    END IF;
END $$;


-- authority/release_held.sql
-- Gives held work, and queued work of an older epoch, the current epoch: at most `p_limit` jobs of a tenant, a class, an
-- operation or everybody, beyond `p_after`. Jobs with an open effect stay as they are; a named one is refused (ZF030). What
-- has no attempt left becomes poison. `after` is where to go on, null at the end.
-- Locks: gate, then the jobs in the order of their keys.
CREATE OR REPLACE FUNCTION fencepost.release_held(
    p_tenant text, p_class text, p_operation text, p_limit integer, p_after text[], p_version bigint, p_actor text, p_reason text,
    p_evidence text, OUT released bigint, OUT open bigint, OUT after text[])
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s'
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_keys record;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 10000 THEN
        PERFORM fencepost._refuse('ZF003', 'limit is not between 1 and 10000', 'limit', NULL);
    ELSIF p_operation IS NOT NULL AND (p_tenant IS NULL OR p_class IS NULL) THEN
        PERFORM fencepost._refuse('ZF003', 'an operation needs its tenant and class', 'operation', NULL);
    END IF;
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM fencepost._require_authority_version(p_version);
    IF EXISTS (SELECT FROM fencepost.restriction AS r
               WHERE r.kind = 'tenant' AND r.subject = p_tenant OR r.kind = 'class' AND r.subject = p_class) THEN
        PERFORM fencepost._refuse('ZF061', 'the tenant is suspended, or the class is disabled', 'restriction',
            'lift it first: fencepost authority lift');
    END IF;
    IF p_operation IS NOT NULL THEN
        PERFORM FROM fencepost.job AS j
        WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class FOR NO KEY UPDATE;
        IF NOT FOUND THEN
            PERFORM fencepost._refuse('ZF050', 'there is no such job', 'operation', 'check tenant, operation and class');
        ELSIF EXISTS (SELECT FROM fencepost.job AS j
                      WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class AND j.open_effects > 0) THEN
            PERFORM fencepost._refuse('ZF030', 'an effect of this job is pending or unknown', 'effect', 'reconcile it first');
        END IF;
    END IF;
    -- First the locks, then (in a later statement) the look.
    WITH found AS MATERIALIZED (
        SELECT j.tenant, j.operation, j.class FROM fencepost.job AS j
        CROSS JOIN fencepost.installation AS i LEFT JOIN fencepost.tenant AS t ON t.tenant = j.tenant
        WHERE j.exec IN ('held', 'queued', 'waiting', 'blocked') AND (j.exec IN ('held', 'blocked') OR j.epoch <> greatest(i.floor, t.epoch))
          AND j.tenant = coalesce(p_tenant, j.tenant) AND j.class = coalesce(p_class, j.class)
          AND j.operation = coalesce(p_operation, j.operation)
          AND (p_after IS NULL OR (j.tenant, j.operation, j.class) > (p_after[1], p_after[2], p_after[3]))
        ORDER BY j.tenant, j.operation, j.class LIMIT p_limit FOR NO KEY UPDATE OF j)
    SELECT array_agg(f.tenant) AS tenants, array_agg(f.operation) AS operations, array_agg(f.class) AS classes INTO v_keys FROM found AS f;
    released := 0;
    open := 0;
    IF v_keys.tenants IS NULL THEN
        RETURN;
    END IF;
    IF cardinality(v_keys.tenants) = p_limit THEN
        after := ARRAY[v_keys.tenants[p_limit], v_keys.operations[p_limit], v_keys.classes[p_limit]];
    END IF;
    WITH looked AS (
        SELECT j.tenant, j.operation, j.class, fencepost._epoch(j.tenant) AS epoch,
               CASE WHEN j.exec <> 'held' THEN NULL
                    WHEN k.policy = 'strict' AND j.applied_effects > 0 AND j.finishes >= k.max_finishes THEN 'finishes_exhausted'
                    WHEN NOT (k.policy = 'strict' AND j.applied_effects > 0) AND j.attempts >= k.max_attempts
                    THEN 'attempts_exhausted' END AS exhausted
        FROM unnest(v_keys.tenants, v_keys.operations, v_keys.classes) AS u (tenant, operation, class)
        JOIN fencepost.job AS j ON j.tenant = u.tenant AND j.operation = u.operation AND j.class = u.class
        LEFT JOIN fencepost.job_class AS k ON k.class = j.class
        WHERE j.open_effects = 0 AND j.exec IN ('held', 'queued', 'waiting')
          AND NOT EXISTS (SELECT FROM fencepost.restriction AS r
                          WHERE r.kind = 'tenant' AND r.subject = j.tenant OR r.kind = 'class' AND r.subject = j.class)
    ), moved AS (
        UPDATE fencepost.job AS j SET epoch = l.epoch,
            exec = CASE WHEN j.exec <> 'held' THEN j.exec WHEN l.exhausted IS NULL THEN 'queued' ELSE 'poison' END,
            run_at = CASE j.exec WHEN 'held' THEN clock_timestamp() ELSE j.run_at END,
            reason = coalesce(l.exhausted, CASE j.exec WHEN 'waiting' THEN j.reason ELSE 'released' END), changed_at = clock_timestamp()
        FROM looked AS l
        WHERE j.tenant = l.tenant AND j.operation = l.operation AND j.class = l.class
        RETURNING 1)
    SELECT count(*) INTO released FROM moved;
    SELECT count(*) INTO open
    FROM unnest(v_keys.tenants, v_keys.operations, v_keys.classes) AS u (tenant, operation, class)
    JOIN fencepost.job AS j ON j.tenant = u.tenant AND j.operation = u.operation AND j.class = u.class
    WHERE j.open_effects > 0;
    IF released > 0 THEN
        PERFORM fencepost._log_authority('released', jsonb_build_object('tenant', p_tenant, 'class', p_class,
            'operation', p_operation, 'released', released, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
    END IF;
END $$;


-- authority/restrict.sql
-- Puts every restriction (kind:subject) that is not there yet into force, under the gate; returns those. Work of a suspended
-- tenant or a disabled class is taken away from its attempts and not claimed; a revoked login is refused
-- every use of authority, every signal and every act of an operator; what it enqueues, submits or reserves is accepted, until
-- PostgreSQL takes its role away.
CREATE OR REPLACE FUNCTION fencepost._restrict(p_restrictions text[], p_reason text)
RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    v_one text;
    v_kind text;
    v_subject text;
    v_made text[] := '{}';
BEGIN
    FOREACH v_one IN ARRAY coalesce(p_restrictions, '{}') LOOP
        v_kind := split_part(v_one, ':', 1);
        v_subject := substr(v_one, length(v_kind) + 2);
        IF v_kind NOT IN ('tenant', 'class', 'principal') THEN
            PERFORM fencepost._refuse('ZF003', 'a restriction is not of a tenant, a class or a principal', 'kind', NULL);
        END IF;
        PERFORM fencepost._require_identity('subject', v_subject);
        INSERT INTO fencepost.restriction (kind, subject, reason) VALUES (v_kind, v_subject, p_reason) ON CONFLICT DO NOTHING;
        CONTINUE WHEN NOT FOUND;
        v_made := v_made || v_one;
        IF v_kind = 'tenant' THEN
            INSERT INTO fencepost.tenant (tenant, epoch, suspended) VALUES (v_subject, fencepost._epoch(v_subject), true)
            ON CONFLICT (tenant) DO UPDATE SET suspended = true, changed_at = clock_timestamp();
            PERFORM fencepost._hold_running(v_subject, NULL, 'suspended');
        ELSIF v_kind = 'class' THEN
            PERFORM fencepost._hold_running(NULL, v_subject, 'disabled');
        END IF;
    END LOOP;
    RETURN v_made;
END $$;

-- Lifts a restriction; what it took away stays held until it is released. Returns false when there is none.
CREATE OR REPLACE FUNCTION fencepost.lift(p_kind text, p_subject text, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._change(p_version);
    DELETE FROM fencepost.restriction AS r WHERE r.kind = p_kind AND r.subject = p_subject;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE fencepost.tenant SET suspended = false, changed_at = clock_timestamp() WHERE p_kind = 'tenant' AND tenant = p_subject;
    PERFORM fencepost._outdate();
    PERFORM fencepost._log_authority('lifted', jsonb_build_object(
        'restriction', p_kind || ':' || p_subject, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
    RETURN true;
END $$;

-- Of these classes, those that are not disabled.
CREATE OR REPLACE FUNCTION fencepost._enabled(p_classes text[])
RETURNS text[] LANGUAGE sql STABLE AS $$
    SELECT coalesce(array_agg(u.class), '{}') FROM unnest(p_classes) AS u (class)
    WHERE NOT EXISTS (SELECT FROM fencepost.restriction AS r WHERE r.kind = 'class' AND r.subject = u.class)
$$;


-- authority/rotate.sql
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


-- authority/seal.sql
-- Seals the database for a planned move: nobody uses its authority any more, and it arms itself once it runs elsewhere (another
-- system or timeline) or was restarted. The caller has told the witness first.
-- Locks: gate EXCLUSIVE (waits at most five seconds for those who use authority now).
CREATE OR REPLACE FUNCTION fencepost.seal(
    p_installation uuid, p_seq bigint, p_nonce uuid, p_next_seq bigint, p_next_nonce uuid,
    p_system_identifier bigint, p_timeline bigint, p_database_oid bigint, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._change(p_version);
    PERFORM fencepost._require_witness(p_installation, p_seq, p_nonce, p_system_identifier, p_timeline, p_database_oid);
    PERFORM fencepost._require_next(p_seq, p_nonce, p_next_seq, p_next_nonce);
    UPDATE fencepost.tip SET seq = p_next_seq, nonce = p_next_nonce, beat_at = clock_timestamp(),
        sealed_start = pg_postmaster_start_time();
    DELETE FROM fencepost.ticket;
    PERFORM fencepost._outdate();
    PERFORM fencepost._log_authority('sealed', jsonb_build_object(
        'seq', p_next_seq, 'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
END $$;


-- authority/status.sql
-- What is in every state, by tenant and class or type: count, oldest age and attempts, with typed reasons; no payloads.
CREATE OR REPLACE VIEW fencepost.status AS
    -- Queued work of an older epoch is held by comparison.
    SELECT 'job'::text AS axis, CASE WHEN h.old THEN 'held' ELSE j.exec END AS state, j.tenant, j.class AS kind,
           CASE WHEN h.old THEN 'old_epoch' ELSE coalesce(j.reason, '') END AS reason, count(*) AS count,
           min(CASE j.exec WHEN 'queued' THEN j.submitted_at ELSE j.changed_at END) AS oldest, max(j.attempts) AS attempts
    FROM fencepost.job AS j
    CROSS JOIN fencepost.installation AS i LEFT JOIN fencepost.tenant AS t ON t.tenant = j.tenant
    CROSS JOIN LATERAL (SELECT j.exec IN ('queued', 'waiting') AND j.epoch <> greatest(i.floor, t.epoch) AS old) AS h
    GROUP BY 1, 2, 3, 4, 5
    UNION ALL
    SELECT 'effect', e.state, e.tenant, e.class, coalesce(e.reason, ''), count(*), min(e.changed_at), max(e.begins)
    FROM fencepost.effect AS e GROUP BY 1, 2, 3, 4, 5
    UNION ALL
    SELECT 'event', 'parked', p.tenant, p.type, p.reason, count(*), min(p.parked_at), max(p.attempts)
    FROM fencepost.parked AS p GROUP BY 1, 2, 3, 4, 5
    UNION ALL
    SELECT 'event', 'overtaken', g.tenant, g.type, g.destination, count(*), min(g.at), 0
    FROM fencepost.overtaken AS g
    WHERE g.at >= clock_timestamp() - (SELECT i.replay_window FROM fencepost.installation AS i)
    GROUP BY 1, 2, 3, 4, 5
    UNION ALL
    SELECT 'delivery', 'dead_letter', coalesce(d.tenant, ''), d.consumer, d.reason, count(*), min(d.created_at), max(d.attempts)
    FROM fencepost.dead_letter AS d GROUP BY 1, 2, 3, 4, 5
    UNION ALL
    SELECT 'reservation', 'reserved', r.tenant, r.consumer, '', count(*), min(r.reserved_at), 0
    FROM fencepost.reservation AS r GROUP BY 1, 2, 3, 4, 5
    UNION ALL
    SELECT h.scope, 'paused', '', h.name, '', 1, h.paused_at, 0 FROM fencepost.paused AS h
    UNION ALL
    SELECT 'class', 'at_limit', '', k.class, '', count(*), min(j.changed_at), 0
    FROM fencepost.job_class AS k
    CROSS JOIN LATERAL (SELECT u.* FROM fencepost.turn AS u WHERE u.class = k.class ORDER BY u.n DESC LIMIT 1) AS t
    CROSS JOIN LATERAL unnest(t.tenants, t.operations, t.generations) AS o (tenant, operation, generation)
    JOIN fencepost.job AS j ON j.tenant = o.tenant AND j.operation = o.operation AND j.class = k.class
    WHERE k.job_limit IS NOT NULL AND j.exec = 'running' AND j.generation = o.generation
    GROUP BY k.class, k.job_limit HAVING count(*) >= k.job_limit;


-- authority/within.sql
-- Refuses unless this principal may act for the tenant, on work of this class (null: of none in particular), and keeps that true
-- until the caller's transaction ends: whatever changes authority waits for it. Writes nothing. Returns the tenant's epoch.
-- Take it outside savepoints, before any domain write: rolling back to an earlier one gives the lock back.
-- Locks: gate.
CREATE OR REPLACE FUNCTION fencepost.within(p_principal text, p_tenant text, p_class text)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_epoch bigint;
    v_granted bigint;
    v_restricted text;
BEGIN
    PERFORM fencepost._require_identity('principal', p_principal);
    PERFORM fencepost._require_identity('tenant', p_tenant);
    IF p_class IS NOT NULL THEN
        PERFORM fencepost._require_identity('class', p_class);
    END IF;
    PERFORM fencepost._enter();
    SELECT r.kind INTO v_restricted FROM fencepost.restriction AS r
    WHERE r.kind = 'principal' AND r.subject = p_principal
       OR r.kind = 'tenant' AND r.subject = p_tenant
       OR r.kind = 'class' AND r.subject = p_class
    ORDER BY r.kind LIMIT 1;
    IF FOUND THEN
        PERFORM fencepost._refuse('ZF061', 'the ' || v_restricted || ' is restricted', v_restricted,
            'an authority admin may lift it: fencepost authority lift');
    ELSIF NOT EXISTS (SELECT FROM fencepost.principal AS p
                      WHERE p.principal = p_principal AND coalesce(p.login, session_user) = session_user) THEN
        PERFORM fencepost._refuse('ZF061', 'it is no principal, or not one of this login', 'principal',
            'an authority admin registers it: fencepost authority principal add');
    END IF;
    v_epoch := fencepost._epoch(p_tenant);
    SELECT max(g.epoch) INTO v_granted FROM fencepost.principal_grant AS g
    WHERE g.principal = p_principal AND g.tenant IN (p_tenant, '*') AND g.class IN (p_class, '*');
    IF v_granted IS NULL THEN
        PERFORM fencepost._refuse('ZF061', 'this was not granted to the principal', 'grant',
            'an authority admin may grant it: fencepost authority principal grant');
    ELSIF v_granted < v_epoch THEN
        PERFORM fencepost._refuse('ZF020', 'it was granted under an older epoch of the tenant', 'epoch',
            'an authority admin may grant it anew: fencepost authority principal grant');
    END IF;
    RETURN v_epoch;
END $$;


-- effects/begin_effect.sql
-- Records the intent before the dispatch. outcome begun: dispatch now, and only within timeout_ms counted from before
-- this call. outcome recorded: the effect happened already, here is its receipt; do not dispatch.
-- Extends the lease past the dispatch deadline, so that nobody takes over while the call may still be under way.
-- Crash here: [E] after this commit and before the outcome: the effect stays pending, then unknown; never sent again
-- without evidence.
CREATE OR REPLACE FUNCTION fencepost.begin_effect(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint,
    p_effect_key text, p_kind text, p_effect_attempt uuid, p_request_digest bytea, p_timeout interval,
    OUT outcome text, OUT timeout_ms bigint, OUT lease_ms bigint, OUT receipt text, OUT result bytea, OUT version integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
    v_class fencepost.job_class;
    v_effect fencepost.effect;
    v_now timestamptz;
BEGIN
    PERFORM fencepost._require_identity('effect_key', p_effect_key);
    IF p_effect_attempt IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'effect_attempt is null', 'effect_attempt', 'make a new UUID for every begin');
    ELSIF p_request_digest IS NULL OR octet_length(p_request_digest) <> 32 THEN
        PERFORM fencepost._refuse('ZF003', 'request_digest is not 32 bytes', 'request_digest', 'sha256 of the request');
    ELSIF p_kind IS NULL OR p_kind NOT IN ('keyed', 'lookup', 'opaque') THEN
        PERFORM fencepost._refuse('ZF003', 'kind is not keyed, lookup or opaque', 'kind', NULL);
    END IF;
    v_job := fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT c.* INTO STRICT v_class FROM fencepost.job_class AS c WHERE c.class = p_class;
    IF p_timeout IS NULL OR p_timeout <= interval '0' OR p_timeout > v_class.max_effect_timeout THEN
        PERFORM fencepost._refuse('ZF003', 'timeout is not within the class maximum', 'timeout', 'raise max_effect_timeout of the class');
    END IF;

    SELECT e.* INTO v_effect FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key FOR UPDATE;
    IF FOUND THEN
        IF v_effect.request_digest <> p_request_digest THEN
            PERFORM fencepost._refuse('ZF010', 'the effect key was already used for another request', 'effect_key',
                'a different request needs a different effect key');
        ELSIF v_effect.state IN ('success', 'resolved_applied') THEN
            outcome := 'recorded';
            receipt := v_effect.receipt;
            result := v_effect.result;
            version := v_effect.version;
            RETURN;
        ELSIF v_effect.state IN ('pending', 'unknown') THEN
            PERFORM fencepost._refuse('ZF030', 'the effect is ' || v_effect.state, 'effect_key', 'record its outcome or reconcile it');
        ELSIF v_effect.class <> p_class THEN
            PERFORM fencepost._refuse('ZF010', 'the effect key belongs to another class of this operation', 'class',
                'use an effect key of its own');
        ELSIF v_effect.kind = 'keyed' AND p_kind <> 'keyed' AND v_effect.quiescent_at > clock_timestamp() THEN
            -- Invariant: what was resolved early because the same provider key would be used again, uses it.
            PERFORM fencepost._refuse('ZF034', 'the earlier call may still be under way, and only its key makes another one safe',
                'kind', 'begin it as keyed, or after its quiescence');
        END IF;
    END IF;
    IF v_job.mode <> 'execute' THEN
        PERFORM fencepost._refuse('ZF032', 'this claim may finish with the recorded receipt, not begin', 'mode',
            'publish with the receipt; declare the class resumable if it has several effects');
    ELSIF fencepost._frozen(p_tenant) THEN
        PERFORM fencepost._refuse('ZF021', 'effects of this tenant are frozen', 'tenant', 'wait for the thaw');
    ELSIF v_class.policy = 'strict' AND EXISTS (
        SELECT FROM fencepost.effect AS e
        WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.class = p_class AND e.effect_key <> p_effect_key) THEN
        PERFORM fencepost._refuse('ZF031', 'a job of a strict class has one effect', 'effect_key', 'declare the class resumable');
    ELSIF v_job.suspect AND v_effect.state IS NULL THEN
        PERFORM fencepost._refuse('ZF030', 'a restore made it doubtful whether this effect was begun before', 'suspect',
            'look at the provider, then say so: fencepost effects reconcile');
    END IF;

    v_now := clock_timestamp();
    INSERT INTO fencepost.effect AS e (tenant, operation, effect_key, class, kind, state, effect_attempt, begun_by,
        request_digest, dispatch_deadline, quiescent_at)
    VALUES (p_tenant, p_operation, p_effect_key, p_class, p_kind, 'pending', p_effect_attempt, p_attempt, p_request_digest,
        v_now + p_timeout, v_now + p_timeout + v_class.network_bound)
    ON CONFLICT (tenant, operation, effect_key) DO UPDATE SET state = 'pending', kind = p_kind, effect_attempt = p_effect_attempt,
        begun_by = p_attempt, dispatch_deadline = v_now + p_timeout,
        request_digest = p_request_digest,
        -- An earlier call under the same provider key may outlast this one.
        quiescent_at = greatest(v_now + p_timeout + v_class.network_bound, CASE e.kind WHEN 'keyed' THEN e.quiescent_at END),
        decision_id = NULL, receipt = NULL, result = NULL, reason = NULL, version = e.version + 1, begins = e.begins + 1,
        begun_at = v_now, changed_at = v_now
    -- Invariant: a job of another class may have begun this key since it was looked at; only these may begin again.
    WHERE e.state IN ('failed_before_dispatch', 'resolved_not_applied') AND e.class = p_class
          AND coalesce(e.request_digest, p_request_digest) = p_request_digest
    RETURNING e.version INTO version;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF030', 'the effect was begun by a job of another class meanwhile', 'effect_key',
            'its receipt can be read once it is recorded');
    END IF;
    PERFORM fencepost._effect_event(p_tenant, p_operation, p_effect_key, v_effect.state, NULL);
    UPDATE fencepost.job AS j SET open_effects = j.open_effects + 1,
        lease_until = greatest(j.lease_until, v_now + p_timeout + v_class.lease)
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class
    RETURNING (extract(epoch FROM j.lease_until - v_now) * 1000)::bigint INTO lease_ms;
    outcome := 'begun';
    timeout_ms := (extract(epoch FROM p_timeout) * 1000)::bigint;
END $$;

-- Appends the state an effect has just reached to its history.
CREATE OR REPLACE FUNCTION fencepost._effect_event(p_tenant text, p_operation text, p_effect_key text, p_was text, p_reason text)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO fencepost.effect_event (tenant, operation, effect_key, effect_attempt, was, became, receipt, reason, version)
    SELECT e.tenant, e.operation, e.effect_key, e.effect_attempt, p_was, e.state, e.receipt, p_reason, e.version
    FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key
$$;


-- effects/decide.sql
-- True when this very decision was taken before: the caller has nothing left to do. Another decision under its id is refused.
CREATE OR REPLACE FUNCTION fencepost._decided(p_decision fencepost.decision)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_was fencepost.decision;
BEGIN
    SELECT d.* INTO v_was FROM fencepost.decision AS d WHERE d.decision_id = p_decision.decision_id;
    IF NOT FOUND THEN
        RETURN false;
    ELSIF (v_was.kind, v_was.actor, v_was.reason, v_was.tenant, v_was.operation, v_was.subject, v_was.verdict, v_was.version,
           v_was.evidence_kind, v_was.evidence_ref, v_was.receipt)
       IS DISTINCT FROM
          (p_decision.kind, p_decision.actor, p_decision.reason, p_decision.tenant, p_decision.operation, p_decision.subject,
           p_decision.verdict, p_decision.version, p_decision.evidence_kind, p_decision.evidence_ref, p_decision.receipt) THEN
        PERFORM fencepost._refuse('ZF010', 'another decision was taken under this id', 'decision_id',
            'make a new UUID for every decision; repeat one only word for word');
    END IF;
    RETURN true;
END $$;

-- Appends a decision to the log; refuses an id that another decision takes at this moment.
CREATE OR REPLACE FUNCTION fencepost._decide(p_decision fencepost.decision)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, tenant, operation, subject, verdict, version, evidence_kind,
        evidence_ref, receipt)
    VALUES (p_decision.decision_id, p_decision.kind, p_decision.actor, p_decision.reason, p_decision.tenant, p_decision.operation,
        p_decision.subject, p_decision.verdict, p_decision.version, p_decision.evidence_kind, p_decision.evidence_ref,
        p_decision.receipt)
    ON CONFLICT (decision_id) DO NOTHING;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF010', 'another decision was taken under this id', 'decision_id', 'make a new UUID for every decision');
    END IF;
END $$;


-- effects/escalate.sql
-- Invariant: an unknown effect has an assignee and a severity from its first moment, whatever made it unknown; a contradicted
-- one is critical at once. What is no longer unknown is nobody's.
CREATE OR REPLACE FUNCTION fencepost._hold_unknown()
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.state <> 'unknown' THEN
        NEW.unknown_since := NULL;
        NEW.escalations := 0;
        NEW.severity := 'normal';
        RETURN NEW;
    END IF;
    IF TG_OP = 'INSERT' OR OLD.state <> 'unknown' THEN
        NEW.unknown_since := clock_timestamp();
        NEW.escalations := 0;
        NEW.severity := 'normal';
        NEW.assignee := (SELECT c.assignee FROM fencepost.job_class AS c WHERE c.class = NEW.class);
    END IF;
    IF NEW.contradicted THEN
        NEW.severity := 'critical';
    END IF;
    RETURN NEW;
END $$;

-- Locks: none where the triggers exist (see append_only).
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'fencepost.effect'::regclass AND tgname = 'hold_unknown') THEN
        CREATE TRIGGER hold_unknown BEFORE UPDATE ON fencepost.effect FOR EACH ROW
            WHEN ((OLD.state = 'unknown') <> (NEW.state = 'unknown') OR OLD.contradicted <> NEW.contradicted)
            EXECUTE FUNCTION fencepost._hold_unknown();
        CREATE TRIGGER hold_unknown_new BEFORE INSERT ON fencepost.effect FOR EACH ROW
            WHEN (NEW.state = 'unknown') EXECUTE FUNCTION fencepost._hold_unknown();
    END IF;
END $$;

-- Says whose unknown effects of a class are, and how they escalate: after each interval at least that severity, and that
-- assignee (null: as before). The handler's process calls it beside register_class.
CREATE OR REPLACE FUNCTION fencepost.set_escalation(
    p_class text, p_assignee text, p_after interval[], p_severity text[], p_to text[])
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_step integer;
BEGIN
    PERFORM fencepost._require_identity('assignee', p_assignee);
    IF p_after IS NULL OR p_severity IS NULL OR p_to IS NULL OR cardinality(p_after) > 10
       OR cardinality(p_after) <> cardinality(p_severity) OR cardinality(p_after) <> cardinality(p_to) THEN
        PERFORM fencepost._refuse('ZF003', 'the escalation is not at most ten steps of interval, severity and assignee', 'escalate', NULL);
    END IF;
    FOR v_step IN 1 .. cardinality(p_after) LOOP
        IF p_after[v_step] IS NULL OR p_after[v_step] <= coalesce(p_after[v_step - 1], interval '0')
           OR p_after[v_step] > interval '3650 days' THEN
            PERFORM fencepost._refuse('ZF003', 'escalation intervals do not grow, or are longer than ten years', 'escalate', NULL);
        ELSIF p_severity[v_step] IS NULL OR p_severity[v_step] NOT IN ('normal', 'high', 'critical') THEN
            PERFORM fencepost._refuse('ZF003', 'severity is not normal, high or critical', 'severity', NULL);
        ELSIF p_to[v_step] IS NOT NULL THEN
            PERFORM fencepost._require_identity('assignee', p_to[v_step]);
        END IF;
    END LOOP;
    IF NOT EXISTS (SELECT FROM fencepost.job_class AS c WHERE c.class = p_class) THEN
        PERFORM fencepost._refuse('ZF051', 'the class is not registered', 'class', 'register it first');
    END IF;
    UPDATE fencepost.job_class AS c SET assignee = p_assignee, escalate_after = p_after, escalate_severity = p_severity, escalate_to = p_to
    WHERE c.class = p_class AND (c.assignee, c.escalate_after, c.escalate_severity, c.escalate_to)
        IS DISTINCT FROM (p_assignee, p_after, p_severity, p_to);
END $$;

CREATE OR REPLACE FUNCTION fencepost._more_severe(p_one text, p_other text)
RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT r.s FROM unnest(ARRAY['critical', 'high', 'normal']) WITH ORDINALITY AS r (s, n)
    WHERE r.s IN (p_one, p_other) ORDER BY r.n LIMIT 1
$$;

-- Takes every step that is due for unknown effects: severity only grows, the assignee may change, and nothing is resolved.
-- Returns how many effects were escalated. Locks: gate, then effects, skipping what others hold.
CREATE OR REPLACE FUNCTION fencepost.escalate_effects(p_limit integer)
RETURNS integer LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_due record;
    v_class fencepost.job_class;
    v_step integer;
    v_severity text;
    v_assignee text;
    v_count integer := 0;
BEGIN
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 10000 THEN
        PERFORM fencepost._refuse('ZF003', 'limit is not between 1 and 10000', 'limit', NULL);
    END IF;
    PERFORM fencepost._enter();
    FOR v_due IN
        SELECT e.* FROM fencepost.effect AS e JOIN fencepost.job_class AS c ON c.class = e.class
        WHERE e.state = 'unknown' AND e.unknown_since + c.escalate_after[e.escalations + 1] <= (SELECT clock_timestamp())
        ORDER BY e.unknown_since, e.tenant, e.operation, e.effect_key LIMIT p_limit FOR NO KEY UPDATE OF e SKIP LOCKED
    LOOP
        SELECT c.* INTO STRICT v_class FROM fencepost.job_class AS c WHERE c.class = v_due.class;
        v_step := v_due.escalations;
        v_severity := v_due.severity;
        v_assignee := v_due.assignee;
        -- Null behind the last step.
        WHILE v_due.unknown_since + v_class.escalate_after[v_step + 1] <= clock_timestamp() LOOP
            v_step := v_step + 1;
            v_severity := fencepost._more_severe(v_severity, v_class.escalate_severity[v_step]);
            v_assignee := coalesce(v_class.escalate_to[v_step], v_assignee);
        END LOOP;
        CONTINUE WHEN v_step = v_due.escalations;
        UPDATE fencepost.effect AS e SET severity = v_severity, assignee = v_assignee, escalations = v_step
        WHERE e.tenant = v_due.tenant AND e.operation = v_due.operation AND e.effect_key = v_due.effect_key;
        PERFORM fencepost._assigned_event(v_due.tenant, v_due.operation, v_due.effect_key, 'escalated');
        v_count := v_count + 1;
    END LOOP;
    RETURN v_count;
END $$;

-- Appends to an effect's history whose it is by now; its state and version stay.
CREATE OR REPLACE FUNCTION fencepost._assigned_event(p_tenant text, p_operation text, p_effect_key text, p_reason text)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO fencepost.effect_event (tenant, operation, effect_key, effect_attempt, was, became, reason, version, severity, assignee)
    SELECT e.tenant, e.operation, e.effect_key, e.effect_attempt, e.state, e.state, p_reason, e.version, e.severity, e.assignee
    FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key
$$;

-- Gives an unknown effect to somebody, and another severity where one is given; its state and version stay.
-- Locks: gate, effect.
CREATE OR REPLACE FUNCTION fencepost.assign_effect(
    p_tenant text, p_operation text, p_effect_key text, p_version integer, p_assignee text, p_severity text, p_decision_id uuid,
    p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_effect fencepost.effect;
    v_decision fencepost.decision;
BEGIN
    PERFORM fencepost._require_identity('assignee', p_assignee);
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    IF p_severity NOT IN ('normal', 'high', 'critical') THEN
        PERFORM fencepost._refuse('ZF003', 'severity is not normal, high or critical', 'severity', NULL);
    ELSIF p_decision_id IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'decision_id is null', 'decision_id', 'make a new UUID for every decision');
    END IF;
    v_decision.decision_id := p_decision_id;
    v_decision.kind := 'assign';
    v_decision.actor := p_actor;
    v_decision.reason := p_reason;
    v_decision.tenant := p_tenant;
    v_decision.operation := p_operation;
    v_decision.subject := p_effect_key;
    v_decision.verdict := concat_ws(', ', p_assignee, p_severity);
    v_decision.version := p_version;
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT e.* INTO v_effect FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF036', 'there is no such effect', 'effect_key', 'check tenant, operation and effect key');
    ELSIF fencepost._decided(v_decision) THEN
        RETURN;
    ELSIF v_effect.state <> 'unknown' THEN
        PERFORM fencepost._refuse('ZF036', 'the effect is ' || v_effect.state || ', not unknown', 'state', 'only an unknown effect is somebody''s');
    ELSIF v_effect.version IS DISTINCT FROM p_version THEN
        PERFORM fencepost._refuse('ZF035', 'the effect changed since it was looked at', 'version', 'look again: fencepost effects show');
    END IF;
    UPDATE fencepost.effect AS e SET assignee = p_assignee, severity = coalesce(p_severity, e.severity)
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key;
    PERFORM fencepost._assigned_event(p_tenant, p_operation, p_effect_key, 'assigned');
    PERFORM fencepost._decide(v_decision);
END $$;


-- effects/look_up.sql
-- Leases unknown effects whose receipt may be looked up, each to one asker at a time: commit, then ask the provider.
-- Contradicted effects are left to people, and so are those whose begin nobody knows, after a restore, unless the provider
-- knows all begins under one key (keyed). quiescent_ms: how long a negative answer will still be refused, 0 when it counts.
-- Crash here: [L] between this commit and the answer: the lease ends, and somebody asks again.
-- Locks: gate, then look-ups in the order of their keys.
CREATE OR REPLACE FUNCTION fencepost.take_lookups(p_classes text[], p_taken_by uuid, p_limit integer, p_lease interval)
RETURNS TABLE (tenant text, operation text, effect_key text, class text, kind text, effect_attempt uuid, version integer,
               asks integer, begun_at timestamptz, quiescent_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF p_taken_by IS NULL OR p_classes IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'taken_by or classes is null', 'taken_by', 'make a new UUID for every question');
    ELSIF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'limit is not between 1 and 1000', 'limit', NULL);
    ELSIF p_lease IS NULL OR p_lease NOT BETWEEN interval '0.1 second' AND interval '1 hour' THEN
        PERFORM fencepost._refuse('ZF003', 'lease is not between 0.1 seconds and an hour', 'lease', NULL);
    END IF;
    PERFORM fencepost._enter();
    RETURN QUERY
    WITH due AS MATERIALIZED (
        SELECT e.tenant, e.operation, e.effect_key, e.version
        FROM fencepost.effect AS e
        LEFT JOIN fencepost.lookup AS l
          ON l.tenant = e.tenant AND l.operation = e.operation AND l.effect_key = e.effect_key
        WHERE e.state = 'unknown' AND e.kind IN ('lookup', 'keyed') AND NOT e.contradicted AND e.class = ANY (p_classes)
          AND (l.due_at IS NULL OR l.due_at <= (SELECT clock_timestamp()))
          -- Invariant: a provider is asked under the key of the only begin that there may have been, or under one that all had.
          AND (e.kind = 'keyed' OR e.effect_attempt IS NOT NULL AND NOT EXISTS (
               SELECT FROM fencepost.effect_event AS v
               WHERE v.tenant = e.tenant AND v.operation = e.operation AND v.effect_key = e.effect_key
                 AND v.reason = 'journalled_begin' AND v.effect_attempt <> e.effect_attempt))
        ORDER BY coalesce(l.due_at, e.unknown_since), e.tenant, e.operation, e.effect_key LIMIT p_limit
    ), taken AS (
        INSERT INTO fencepost.lookup AS l (tenant, operation, effect_key, version, taken_by, taken_at, due_at)
        SELECT d.tenant, d.operation, d.effect_key, d.version, p_taken_by, clock_timestamp(), clock_timestamp() + p_lease
        FROM due AS d ORDER BY d.tenant, d.operation, d.effect_key
        ON CONFLICT (tenant, operation, effect_key) DO UPDATE SET version = excluded.version, taken_by = excluded.taken_by,
            taken_at = excluded.taken_at, due_at = excluded.due_at,
            asks = CASE WHEN l.version = excluded.version THEN l.asks + 1 ELSE 1 END
        -- Invariant: somebody else may have taken it since it was looked at.
        WHERE l.due_at <= clock_timestamp()
        RETURNING l.*
    )
    SELECT e.tenant, e.operation, e.effect_key, e.class, e.kind, e.effect_attempt, e.version, t.asks, e.begun_at,
           greatest(0, ceil(extract(epoch FROM e.quiescent_at - t.taken_at) * 1000))::bigint
    FROM taken AS t
    JOIN fencepost.effect AS e ON e.tenant = t.tenant AND e.operation = t.operation AND e.effect_key = t.effect_key;
END $$;

-- Settles an effect by what its look-up said, through reconcile, as an operator would. A negative answer counts only when
-- the question was asked after the call could no longer be under way (ZF034): one asked before may have been overtaken.
-- Locks: gate, job, effect, look-up.
CREATE OR REPLACE FUNCTION fencepost.settle_lookup(
    p_tenant text, p_operation text, p_effect_key text, p_taken_by uuid, p_version integer, p_verdict text, p_evidence_ref text,
    p_receipt text, p_decision_id uuid, p_actor text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_taken_at timestamptz;
    v_quiescent_at timestamptz;
    v_became text;
BEGIN
    PERFORM fencepost._enter();
    SELECT l.taken_at, e.quiescent_at INTO v_taken_at, v_quiescent_at
    FROM fencepost.lookup AS l
    JOIN fencepost.effect AS e ON e.tenant = l.tenant AND e.operation = l.operation AND e.effect_key = l.effect_key
    WHERE l.tenant = p_tenant AND l.operation = p_operation AND l.effect_key = p_effect_key AND l.taken_by = p_taken_by;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF033', 'the look-up was taken over by another worker', 'taken_by', 'leave the answer to it');
    ELSIF p_verdict IS DISTINCT FROM 'applied' AND v_taken_at < v_quiescent_at THEN
        PERFORM fencepost._refuse('ZF034', 'the call may still have been under way when the provider was asked', 'quiescent_at', 'ask again later');
    END IF;
    v_became := fencepost.reconcile(p_tenant, p_operation, p_effect_key, p_version, p_verdict, 'receipt_lookup', p_evidence_ref,
        p_receipt, p_decision_id, p_actor, 'receipt looked up');
    UPDATE fencepost.lookup AS l SET answer = p_verdict, answered_at = clock_timestamp(), due_at = clock_timestamp()
    WHERE l.tenant = p_tenant AND l.operation = p_operation AND l.effect_key = p_effect_key AND l.taken_by = p_taken_by;
    RETURN v_became;
END $$;

-- An answer that settles nothing: asked again after the delay. False when another worker has taken the question over.
CREATE OR REPLACE FUNCTION fencepost.defer_lookup(
    p_tenant text, p_operation text, p_effect_key text, p_taken_by uuid, p_answer text, p_delay interval)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._require_identity('answer', p_answer);
    IF p_delay IS NULL OR p_delay NOT BETWEEN interval '0' AND interval '2 days' THEN
        PERFORM fencepost._refuse('ZF003', 'delay is not between 0 and two days', 'delay', NULL);
    END IF;
    UPDATE fencepost.lookup AS l SET answer = p_answer, answered_at = clock_timestamp(), due_at = clock_timestamp() + p_delay
    WHERE l.tenant = p_tenant AND l.operation = p_operation AND l.effect_key = p_effect_key AND l.taken_by = p_taken_by;
    RETURN FOUND;
END $$;


-- effects/present.sql
-- Presents a begin that a runner's journal holds and that it does not know to have failed: what may have been dispatched
-- is never taken for never begun. Returns
--   known       this begin is in the effect's history: its own transitions settle it
--   unknown     it was not, and the effect is unknown from here on: its job waits for evidence
--   superseded  another begin of the effect is unknown or applied: kept as evidence, no state changes by it
--   pending     another begin of the effect is under way: nothing is kept, present it again later
--   no_job      there is no such job: this database has lost it, or is another one
-- Takes authority away and gives none: needs the gate and an armed database, no fence.
-- Crash here: [K5] after this commit and before the journal notes it: the next presentation finds it known.
-- Locks: gate, job, effect; a begin that may still commit holds the job, so it is waited for (five seconds, 55P03).
CREATE OR REPLACE FUNCTION fencepost.present_begin(
    p_tenant text, p_operation text, p_class text, p_effect_key text, p_kind text, p_effect_attempt uuid, p_attempt uuid,
    p_request_digest bytea)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_job fencepost.job;
    v_effect fencepost.effect;
    v_class text := p_class;
    v_quiescent timestamptz;
BEGIN
    PERFORM fencepost._require_identity('effect_key', p_effect_key);
    IF p_effect_attempt IS NULL OR p_attempt IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'effect_attempt or attempt is null', 'effect_attempt', NULL);
    ELSIF p_request_digest IS NULL OR octet_length(p_request_digest) <> 32 THEN
        PERFORM fencepost._refuse('ZF003', 'request_digest is not 32 bytes', 'request_digest', 'sha256 of the request');
    ELSIF p_kind IS NULL OR p_kind NOT IN ('keyed', 'lookup', 'opaque') THEN
        PERFORM fencepost._refuse('ZF003', 'kind is not keyed, lookup or opaque', 'kind', NULL);
    END IF;
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    -- The effect's own class, where a job of another class has begun this key.
    SELECT e.class INTO v_class FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key;
    v_class := coalesce(v_class, p_class);
    SELECT j.* INTO v_job FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = v_class FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN 'no_job';
    END IF;
    SELECT e.* INTO v_effect FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key FOR UPDATE;
    IF v_effect.effect_attempt = p_effect_attempt OR EXISTS (
        SELECT FROM fencepost.effect_event AS v
        WHERE v.tenant = p_tenant AND v.operation = p_operation AND v.effect_key = p_effect_key
          AND v.effect_attempt = p_effect_attempt) THEN
        RETURN 'known';
    ELSIF v_effect.state = 'pending' THEN
        RETURN 'pending';
    ELSIF v_effect.state IN ('unknown', 'success', 'resolved_applied') THEN
        INSERT INTO fencepost.effect_event (tenant, operation, effect_key, effect_attempt, was, became, reason, version)
        VALUES (p_tenant, p_operation, p_effect_key, p_effect_attempt, v_effect.state, v_effect.state, 'journalled_begin',
            v_effect.version);
        RETURN 'superseded';
    END IF;

    v_quiescent := clock_timestamp() + coalesce(
        (SELECT c.network_bound FROM fencepost.job_class AS c WHERE c.class = v_class), interval '30 s');
    IF v_effect.state IS NULL THEN
        INSERT INTO fencepost.effect (tenant, operation, effect_key, class, kind, state, effect_attempt, begun_by, request_digest,
            dispatch_deadline, quiescent_at, reason)
        VALUES (p_tenant, p_operation, p_effect_key, v_class, p_kind, 'unknown', p_effect_attempt, p_attempt, p_request_digest,
            clock_timestamp(), v_quiescent, 'journalled_begin');
    ELSE
        -- "Failed before dispatch" and "not applied" were said of other begins.
        UPDATE fencepost.effect AS e SET state = 'unknown', effect_attempt = p_effect_attempt, begun_by = p_attempt,
            quiescent_at = greatest(e.quiescent_at, v_quiescent), decision_id = NULL, reason = 'journalled_begin',
            version = e.version + 1, begins = e.begins + 1, changed_at = clock_timestamp()
        WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key;
    END IF;
    PERFORM fencepost._effect_event(p_tenant, p_operation, p_effect_key, v_effect.state, 'journalled_begin');
    UPDATE fencepost.job AS j SET open_effects = CASE j.exec WHEN 'done' THEN 0 ELSE j.open_effects + 1 END
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = v_class
    RETURNING j.* INTO v_job;
    IF v_job.exec = 'running' THEN
        PERFORM fencepost._leave(v_job, 'effect_unknown', 'journalled_begin', interval '0');
    ELSIF v_job.exec NOT IN ('done', 'cancelled', 'blocked') THEN
        UPDATE fencepost.job AS j SET exec = 'blocked', generation = j.generation + 1, reason = 'effect_unknown',
            detail = 'journalled_begin', changed_at = clock_timestamp()
        WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = v_class;
    END IF;
    RETURN 'unknown';
END $$;

-- Which of these begins the database has no trace of; the arrays are read side by side.
CREATE OR REPLACE FUNCTION fencepost.missing_begins(
    p_tenants text[], p_operations text[], p_effect_keys text[], p_effect_attempts uuid[])
RETURNS SETOF uuid LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT b.effect_attempt
    FROM unnest(p_tenants, p_operations, p_effect_keys, p_effect_attempts) AS b (tenant, operation, effect_key, effect_attempt)
    WHERE NOT EXISTS (SELECT FROM fencepost.effect AS e
                      WHERE e.tenant = b.tenant AND e.operation = b.operation AND e.effect_key = b.effect_key
                        AND e.effect_attempt = b.effect_attempt)
      AND NOT EXISTS (SELECT FROM fencepost.effect_event AS v
                      WHERE v.tenant = b.tenant AND v.operation = b.operation AND v.effect_key = b.effect_key
                        AND v.effect_attempt = b.effect_attempt)
$$;


-- effects/reconcile.sql
-- Settles an unknown effect by evidence: applied (with a receipt) or not_applied. "Not applied" is refused (ZF034)
-- before the call can no longer be under way, unless the worker's end is attested or the same provider key is used again.
-- The same decision again, word for word under its id, changes nothing and says the same.
-- For a suspect job also an effect of which this database knows nothing (version 0): a restore may have lost its begin. It
-- is made, of the kind given, for the class given where the operation has several.
-- Locks: gate, job, effect.
CREATE OR REPLACE FUNCTION fencepost.reconcile(
    p_tenant text, p_operation text, p_effect_key text, p_version integer, p_verdict text, p_evidence_kind text,
    p_evidence_ref text, p_receipt text, p_decision_id uuid, p_actor text, p_reason text,
    p_class text DEFAULT NULL, p_kind text DEFAULT 'opaque')
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
    v_effect fencepost.effect;
    v_decision fencepost.decision;
    v_class text;
    v_became text;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    IF p_verdict IS NULL OR p_verdict NOT IN ('applied', 'not_applied') THEN
        PERFORM fencepost._refuse('ZF003', 'verdict is neither applied nor not_applied', 'verdict', NULL);
    ELSIF p_evidence_kind IS NULL OR p_evidence_kind NOT IN ('receipt_lookup', 'provider_statement', 'termination_attested', 'operator') THEN
        PERFORM fencepost._refuse('ZF037', 'evidence_kind is not receipt_lookup, provider_statement, termination_attested or operator',
            'evidence_kind', NULL);
    ELSIF p_evidence_ref IS NULL OR btrim(p_evidence_ref) = '' THEN
        PERFORM fencepost._refuse('ZF037', 'evidence_ref is empty', 'evidence_ref', 'say where the evidence can be found');
    ELSIF length(p_evidence_ref) > 2000 THEN
        PERFORM fencepost._refuse('ZF003', 'evidence_ref is longer than 2000 characters', 'evidence_ref', 'refer to the evidence, do not quote it');
    ELSIF p_verdict = 'applied' AND (p_receipt IS NULL OR btrim(p_receipt) = '') THEN
        PERFORM fencepost._refuse('ZF037', 'applied needs the provider''s receipt', 'receipt', NULL);
    ELSIF length(p_receipt) > 2000 THEN
        PERFORM fencepost._refuse('ZF003', 'receipt is longer than 2000 characters', 'receipt', 'give the provider''s reference');
    ELSIF p_decision_id IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'decision_id is null', 'decision_id', 'make a new UUID for every decision');
    END IF;
    v_became := CASE p_verdict WHEN 'applied' THEN 'resolved_applied' ELSE 'resolved_not_applied' END;
    v_decision.decision_id := p_decision_id;
    v_decision.kind := 'reconcile';
    v_decision.actor := p_actor;
    v_decision.reason := p_reason;
    v_decision.tenant := p_tenant;
    v_decision.operation := p_operation;
    v_decision.subject := p_effect_key;
    v_decision.verdict := p_verdict;
    v_decision.version := p_version;
    v_decision.evidence_kind := p_evidence_kind;
    v_decision.evidence_ref := p_evidence_ref;
    v_decision.receipt := CASE p_verdict WHEN 'applied' THEN p_receipt END;

    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT e.class INTO v_class FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key;
    IF NOT FOUND THEN
        v_class := fencepost._doubt_effect(p_tenant, p_operation, p_class, p_effect_key, p_kind, p_version, p_verdict, p_evidence_kind);
    END IF;
    SELECT j.* INTO STRICT v_job FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = v_class FOR NO KEY UPDATE;
    SELECT e.* INTO STRICT v_effect FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key FOR UPDATE;
    IF fencepost._decided(v_decision) THEN
        RETURN v_became;
    ELSIF v_effect.state <> 'unknown' THEN
        PERFORM fencepost._refuse('ZF036', 'the effect is ' || v_effect.state || ', not unknown', 'state',
            'only an unknown effect is reconciled; a pending one becomes unknown at its deadline');
    ELSIF v_effect.version IS DISTINCT FROM p_version THEN
        PERFORM fencepost._refuse('ZF035', 'the effect changed since it was looked at', 'version', 'look again: fencepost effects show');
    ELSIF p_verdict = 'not_applied' AND v_effect.quiescent_at > clock_timestamp() AND p_evidence_kind <> 'termination_attested'
          AND v_effect.kind <> 'keyed' THEN
        PERFORM fencepost._refuse('ZF034', 'the call may still be under way', 'quiescent_at',
            'decide after ' || to_char(v_effect.quiescent_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC, or attest that the worker ended');
    END IF;
    UPDATE fencepost.effect AS e SET state = v_became, receipt = v_decision.receipt, decision_id = p_decision_id, reason = NULL,
        version = e.version + 1, changed_at = clock_timestamp()
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key;
    PERFORM fencepost._effect_event(p_tenant, p_operation, p_effect_key, 'unknown', p_reason);
    PERFORM fencepost._decide(v_decision);
    PERFORM fencepost._settle(v_job, CASE p_verdict WHEN 'applied' THEN 1 ELSE 0 END);
    RETURN v_became;
END $$;

-- Makes an unknown effect of a suspect job, so that it can be settled; the caller settles it in the same transaction. Returns
-- its class. Refused (ZF036) for any other job.
CREATE OR REPLACE FUNCTION fencepost._doubt_effect(
    p_tenant text, p_operation text, p_class text, p_effect_key text, p_kind text, p_version integer, p_verdict text, p_evidence_kind text)
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_job fencepost.job;
    v_class text;
BEGIN
    SELECT j.class INTO v_class FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = coalesce(p_class, j.class) AND j.suspect
      AND (p_class IS NOT NULL OR 1 = (SELECT count(*) FROM fencepost.job AS o
                                       WHERE o.tenant = p_tenant AND o.operation = p_operation AND o.suspect));
    IF FOUND THEN
        SELECT j.* INTO v_job FROM fencepost.job AS j
        WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = v_class FOR NO KEY UPDATE;
    END IF;
    IF v_job.suspect IS NOT TRUE THEN
        PERFORM fencepost._refuse('ZF036', 'there is no such effect', 'effect_key', 'check tenant, operation and effect key');
    ELSIF p_version IS DISTINCT FROM 0 THEN
        PERFORM fencepost._refuse('ZF035', 'nothing is known of this effect: its version is 0', 'version', 'look again: fencepost effects show');
    ELSIF p_kind IS NULL OR p_kind NOT IN ('keyed', 'lookup', 'opaque') THEN
        PERFORM fencepost._refuse('ZF003', 'kind is not keyed, lookup or opaque', 'kind', NULL);
    END IF;
    INSERT INTO fencepost.effect (tenant, operation, effect_key, class, kind, state, dispatch_deadline, quiescent_at, reason, version, begins)
    VALUES (p_tenant, p_operation, p_effect_key, v_class, p_kind, 'unknown', v_job.quiescent_at, v_job.quiescent_at, 'suspect', 0, 0);
    PERFORM fencepost._effect_event(p_tenant, p_operation, p_effect_key, NULL, 'suspect');
    UPDATE fencepost.job AS j SET open_effects = j.open_effects + 1
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = v_class AND j.exec <> 'done';
    RETURN v_class;
END $$;


-- effects/record_effect.sql
-- A pending effect whose worker is gone or whose deadline passed: nobody knows. The job row is locked by the caller.
CREATE OR REPLACE FUNCTION fencepost._forget(p_tenant text, p_operation text, p_effect_key text, p_reason text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fencepost.effect AS e SET state = 'unknown', reason = p_reason, version = e.version + 1, changed_at = clock_timestamp()
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key AND e.state = 'pending';
    IF FOUND THEN
        PERFORM fencepost._effect_event(p_tenant, p_operation, p_effect_key, 'pending', p_reason);
    END IF;
END $$;

-- Pending effects of jobs that no longer run turn unknown at their own deadline (a cancelled job's, for one).
CREATE OR REPLACE FUNCTION fencepost._expire_effects(p_classes text[], p_limit integer)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_key record;
    v_count integer := 0;
BEGIN
    FOR v_key IN
        WITH due AS MATERIALIZED (
            SELECT e.tenant, e.operation, e.class, e.effect_key FROM fencepost.effect AS e
            WHERE e.state = 'pending' AND e.class = ANY (p_classes) AND e.quiescent_at <= (SELECT clock_timestamp()))
        SELECT e.tenant, e.operation, e.effect_key
        FROM (SELECT d.* FROM due AS d ORDER BY d.tenant, d.operation, d.effect_key) AS e
        CROSS JOIN LATERAL (
            SELECT FROM fencepost.job AS j
            WHERE j.tenant = e.tenant AND j.operation = e.operation AND j.class = e.class AND j.exec <> 'running'
            FOR NO KEY UPDATE SKIP LOCKED) AS j
        LIMIT p_limit
    LOOP
        PERFORM fencepost._forget(v_key.tenant, v_key.operation, v_key.effect_key, 'deadline_passed');
        v_count := v_count + 1;
    END LOOP;
    RETURN v_count;
END $$;

-- Settles what an open effect was to its job: one less open, one more applied, and a blocked job runs again, or is poison
-- when its budget is used up.
CREATE OR REPLACE FUNCTION fencepost._settle(p_job fencepost.job, p_applied integer)
RETURNS void LANGUAGE sql AS $$
    UPDATE fencepost.job AS j SET
        open_effects = j.open_effects - CASE j.exec WHEN 'done' THEN 0 ELSE 1 END,
        applied_effects = j.applied_effects + p_applied,
        exec = CASE WHEN NOT d.unblocked THEN j.exec WHEN d.exhausted IS NULL THEN 'queued' ELSE 'poison' END,
        run_at = CASE WHEN d.unblocked THEN clock_timestamp() ELSE j.run_at END,
        reason = CASE WHEN d.unblocked THEN coalesce(d.exhausted, 'effect_settled') ELSE j.reason END,
        changed_at = clock_timestamp()
    FROM (
        SELECT p_job.exec = 'blocked' AND p_job.open_effects = 1 AS unblocked,
               CASE WHEN c.policy = 'strict' AND p_job.applied_effects + p_applied > 0
                    THEN CASE WHEN p_job.finishes >= c.max_finishes THEN 'finishes_exhausted' END
                    ELSE CASE WHEN p_job.attempts >= c.max_attempts THEN 'attempts_exhausted' END END AS exhausted
        FROM fencepost.job_class AS c WHERE c.class = p_job.class) AS d
    WHERE j.tenant = p_job.tenant AND j.operation = p_job.operation AND j.class = p_job.class
$$;

-- A receipt against the belief that nothing happened: unknown again, and the job stops until somebody has looked.
CREATE OR REPLACE FUNCTION fencepost._dispute(p_effect fencepost.effect, p_receipt text, p_result bytea)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fencepost.effect AS e SET contradicted = true, state = 'unknown', reason = 'contradicted', version = e.version + 1,
        receipt = p_receipt, result = p_result, decision_id = NULL, changed_at = clock_timestamp()
    WHERE e.tenant = p_effect.tenant AND e.operation = p_effect.operation AND e.effect_key = p_effect.effect_key;
    PERFORM fencepost._effect_event(p_effect.tenant, p_effect.operation, p_effect.effect_key, p_effect.state, 'contradicted');
    UPDATE fencepost.job AS j SET open_effects = CASE WHEN j.exec = 'done' THEN 0 ELSE j.open_effects + 1 END,
        exec = CASE WHEN j.exec IN ('done', 'cancelled') THEN j.exec ELSE 'blocked' END,
        generation = j.generation + 1, attempt = NULL, owner = NULL, lease_until = NULL,
        reason = 'effect_contradicted', changed_at = clock_timestamp()
    WHERE j.tenant = p_effect.tenant AND j.operation = p_effect.operation AND j.class = p_effect.class;
END $$;

-- Records what became of an effect. Needs the effect attempt, not the lease: late evidence is welcome, late authority is
-- not. Only success (with a receipt) and failed_before_dispatch are definite; unknown takes the job away from its attempt.
-- Returns the state of the effect, or superseded: the receipt of an earlier begin was kept as evidence, and only that.
-- Locks: gate, job, effect.
CREATE OR REPLACE FUNCTION fencepost.record_effect(
    p_tenant text, p_operation text, p_effect_key text, p_effect_attempt uuid, p_outcome text, p_receipt text,
    p_result bytea, p_reason text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
    v_effect fencepost.effect;
    v_class text;
    v_outcome text := p_outcome;
BEGIN
    IF p_outcome IS NULL OR p_outcome NOT IN ('success', 'failed_before_dispatch', 'unknown') THEN
        PERFORM fencepost._refuse('ZF003', 'outcome is not success, failed_before_dispatch or unknown', 'outcome', NULL);
    ELSIF p_outcome = 'success' AND (p_receipt IS NULL OR length(p_receipt) NOT BETWEEN 1 AND 2000) THEN
        PERFORM fencepost._refuse('ZF037', 'success needs the provider''s receipt', 'receipt', 'without one the effect is unknown');
    ELSIF octet_length(p_result) > 1048576 THEN
        PERFORM fencepost._refuse('ZF003', 'result is larger than 1 MiB', 'result', 'keep a reference');
    END IF;
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT e.class INTO v_class FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF033', 'no such effect was begun', 'effect_key', 'begin before the dispatch');
    END IF;
    SELECT j.* INTO STRICT v_job FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = v_class FOR NO KEY UPDATE;
    SELECT e.* INTO STRICT v_effect FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key FOR UPDATE;
    IF v_effect.effect_attempt IS DISTINCT FROM p_effect_attempt AND p_outcome = 'success' AND EXISTS (
        SELECT FROM fencepost.effect_event AS v
        WHERE v.tenant = p_tenant AND v.operation = p_operation AND v.effect_key = p_effect_key
          AND v.effect_attempt = p_effect_attempt) THEN
        -- A receipt of an earlier begin, after a later one: kept as evidence and flagged. It stops an effect that would be
        -- begun again; an open or applied one keeps its state.
        INSERT INTO fencepost.effect_event (tenant, operation, effect_key, effect_attempt, was, became, receipt, reason, version)
        VALUES (p_tenant, p_operation, p_effect_key, p_effect_attempt, v_effect.state, v_effect.state, p_receipt,
            'late_receipt_of_earlier_attempt', v_effect.version);
        IF v_effect.state IN ('failed_before_dispatch', 'resolved_not_applied') THEN
            PERFORM fencepost._dispute(v_effect, p_receipt, p_result);
            RETURN 'unknown';
        END IF;
        UPDATE fencepost.effect AS e SET contradicted = true
        WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key AND NOT e.contradicted;
        RETURN 'superseded';
    ELSIF v_effect.effect_attempt IS DISTINCT FROM p_effect_attempt THEN
        PERFORM fencepost._refuse('ZF033', 'the effect was begun again by another attempt', 'effect_attempt',
            'give the receipt to an operator: fencepost effects reconcile');
    END IF;

    -- Invariant: a receipt on record is never overruled by a worker that did not send.
    IF p_outcome = 'failed_before_dispatch' AND v_effect.contradicted THEN
        v_outcome := 'unknown';
    END IF;
    IF p_outcome = 'success' AND v_effect.state IN ('success', 'resolved_applied') THEN
        IF v_effect.receipt <> p_receipt THEN
            -- Late evidence is always kept; it agrees that the effect happened, so nothing else changes.
            INSERT INTO fencepost.effect_event (tenant, operation, effect_key, effect_attempt, was, became, receipt, reason, version)
            VALUES (p_tenant, p_operation, p_effect_key, p_effect_attempt, v_effect.state, v_effect.state, p_receipt,
                'another_receipt', v_effect.version);
        END IF;
        RETURN v_effect.state;
    ELSIF p_outcome = 'success' AND v_effect.state IN ('failed_before_dispatch', 'resolved_not_applied') THEN
        PERFORM fencepost._dispute(v_effect, p_receipt, p_result);
        RETURN 'unknown';
    ELSIF p_outcome = 'success' AND v_effect.reason = 'contradicted' THEN
        RETURN 'unknown';
    ELSIF v_effect.state NOT IN ('pending', 'unknown') OR v_outcome = 'unknown' AND v_effect.state = 'unknown' THEN
        PERFORM fencepost._refuse('ZF033', 'the effect is already ' || v_effect.state, 'effect_key', 'nothing is left to record');
    END IF;

    UPDATE fencepost.effect AS e SET state = v_outcome, receipt = CASE v_outcome WHEN 'success' THEN p_receipt ELSE e.receipt END,
        result = CASE v_outcome WHEN 'success' THEN p_result ELSE e.result END, reason = left(p_reason, 500),
        version = e.version + 1, changed_at = clock_timestamp()
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key;
    PERFORM fencepost._effect_event(p_tenant, p_operation, p_effect_key, v_effect.state, left(p_reason, 500));
    IF v_outcome = 'unknown' THEN
        IF v_job.exec = 'running' AND v_job.attempt = v_effect.begun_by THEN
            PERFORM fencepost._leave(v_job, 'effect_unknown', left(coalesce(p_reason, ''), 500), interval '0');
        END IF;
    ELSE
        PERFORM fencepost._settle(v_job, CASE v_outcome WHEN 'success' THEN 1 ELSE 0 END);
    END IF;
    RETURN v_outcome;
END $$;


-- effects/unknown_effects.sql
-- Unknown effects by class and severity: how many, since when, and how many nobody escalated although it is long due. No tenants,
-- no keys: what may be shown to anybody who watches.
CREATE OR REPLACE VIEW fencepost.unknown_effects AS
    SELECT e.class, e.severity, count(*) AS count, min(e.unknown_since) AS oldest,
           count(*) FILTER (WHERE e.unknown_since + c.escalate_after[e.escalations + 1] < clock_timestamp() - interval '10 minutes') AS overdue
    FROM fencepost.effect AS e JOIN fencepost.job_class AS c ON c.class = e.class
    WHERE e.state = 'unknown' GROUP BY e.class, e.severity;


-- inbox/dead_letter.sql
CREATE OR REPLACE FUNCTION fencepost._dead_letter(
    p_consumer text, p_coordinates text, p_reason text, p_field text, p_detail text, p_tenant text, p_operation text,
    p_type text, p_version integer, p_event_id uuid, p_stored_meaning bytea, p_arrived_meaning bytea, p_attempts integer,
    p_headers jsonb, p_payload bytea)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO fencepost.dead_letter AS d (consumer, coordinates, reason, field, detail, tenant, operation, type, version,
        event_id, stored_meaning, arrived_meaning, attempts, headers, payload, content)
    VALUES (p_consumer, p_coordinates, p_reason, p_field, p_detail, p_tenant, p_operation, p_type, p_version,
        p_event_id, p_stored_meaning, p_arrived_meaning, p_attempts, p_headers, p_payload,
        sha256(convert_to(p_headers::text, 'UTF8') || p_payload))
    ON CONFLICT (consumer, coordinates, reason, content) DO UPDATE
    SET attempts = d.attempts + excluded.attempts, field = excluded.field, detail = excluded.detail,
        stored_meaning = excluded.stored_meaning, arrived_meaning = excluded.arrived_meaning, last_at = clock_timestamp()
$$;

-- Refuses coordinates that name nothing, or more than an index can hold.
CREATE OR REPLACE FUNCTION fencepost._require_coordinates(p_coordinates text)
RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_coordinates IS NULL OR p_coordinates = '' OR octet_length(p_coordinates) > 1500 THEN
        PERFORM fencepost._refuse('ZF003', 'coordinates are empty or longer than 1500 bytes', 'coordinates',
            'name broker, place and message');
    END IF;
END $$;

-- Keeps a delivery that cannot be handled: unreadable, of a type or version that nobody here knows, or failed by its handler
-- too often. Once per delivery, reason and content; again is counted. p_meaning: what it means, where that could be read.
CREATE OR REPLACE FUNCTION fencepost.dead_letter(
    p_consumer text, p_coordinates text, p_reason text, p_field text, p_detail text, p_tenant text, p_operation text,
    p_type text, p_version integer, p_event_id uuid, p_attempts integer, p_headers jsonb, p_payload bytea,
    p_meaning bytea DEFAULT NULL)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._require_identity('consumer', p_consumer);
    IF p_reason IS NULL OR p_reason NOT IN ('undecodable', 'unknown_type', 'newer_version', 'handler_failed') THEN
        PERFORM fencepost._refuse('ZF003', 'reason is not undecodable, unknown_type, newer_version or handler_failed', 'reason', NULL);
    END IF;
    PERFORM fencepost._require_coordinates(p_coordinates);
    IF p_headers IS NULL OR p_payload IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'headers or payload are null', 'payload', 'give what arrived, empty if there was nothing');
    ELSIF octet_length(p_meaning) <> 33 THEN
        PERFORM fencepost._refuse('ZF003', 'meaning is not 33 bytes long', 'meaning', 'a tag and a sha256, or null');
    END IF;
    -- Others act upon this commit (a broker is acked, an operator is told): it must survive a crash.
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM fencepost._dead_letter(p_consumer, p_coordinates, p_reason, p_field, coalesce(p_detail, ''), p_tenant, p_operation, p_type,
        p_version, p_event_id, NULL, p_meaning, greatest(p_attempts, 1), p_headers, p_payload);
END $$;


-- inbox/dead_letters.sql
-- Dead letters as they may be looked at: everything but headers and payload.
CREATE OR REPLACE VIEW fencepost.dead_letters AS
    SELECT d.id, d.consumer, d.reason, d.field, d.detail, d.tenant, d.operation, d.type, d.version, d.event_id, d.attempts,
           d.coordinates, 'sha256-v1:' || encode(substr(d.stored_meaning, 2), 'hex') AS stored_meaning,
           'sha256-v1:' || encode(substr(d.arrived_meaning, 2), 'hex') AS arrived_meaning,
           'sha256:' || encode(d.content, 'hex') AS content, octet_length(d.payload) AS bytes, d.created_at, d.last_at,
           d.due_at, d.takes, d.unhandled, d.released_epoch
    FROM fencepost.dead_letter AS d;


-- inbox/discard_dead_letter.sql
-- Gives a dead letter up, on an operator's word, which is kept for ever with both what and where it was.
CREATE OR REPLACE FUNCTION fencepost.discard_dead_letter(p_id bigint, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_letter fencepost.dead_letter;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    v_letter := fencepost._lock_dead_letter(p_id);
    DELETE FROM fencepost.dead_letter AS d WHERE d.id = p_id;
    PERFORM fencepost._decide_dead_letter('discard_dead_letter', v_letter, p_actor, p_reason, 'discarded');
END $$;

-- The content of a dead letter; who read it, and why, is kept.
CREATE OR REPLACE FUNCTION fencepost.read_dead_letter(
    p_id bigint, p_actor text, p_reason text, OUT headers jsonb, OUT payload bytea)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_letter fencepost.dead_letter;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._require_login();
    SELECT d.* INTO v_letter FROM fencepost.dead_letter AS d WHERE d.id = p_id;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such dead letter', 'id', 'see: fencepost deadletters list');
    END IF;
    PERFORM fencepost._decide_dead_letter('read_dead_letter', v_letter, p_actor, p_reason, 'read');
    headers := v_letter.headers;
    payload := v_letter.payload;
END $$;


-- inbox/old_epoch.sql
-- What this installation accepted before a rotation: its consumers set it aside until an authority admin releases it.

-- Whether an event is from here, of an epoch before the one that its tenant stands at now, and not released under that one.
-- Of other installations' events the epoch is data. `source` is what the relay writes into every event of this installation.
CREATE OR REPLACE FUNCTION fencepost._is_of_old_epoch(
    p_tenant text, p_consumer text, p_source text, p_epoch bigint, p_event_id uuid, p_meaning bytea, p_coordinates text)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM fencepost.installation AS i WHERE p_source = 'urn:fencepost:' || i.id)
       AND p_epoch < fencepost._epoch(p_tenant)
       AND NOT EXISTS (SELECT FROM fencepost.dead_letter AS d
                       WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates AND d.event_id = p_event_id
                         AND d.arrived_meaning = p_meaning AND d.released_epoch = fencepost._epoch(p_tenant))
$$;

-- Lets a delivery be handled under the epoch that its tenant stands at now, although it was accepted under an older one: its
-- consumer handles it in its idle time, once. After another rotation it needs another release. What was reserved in a
-- transaction of the caller's own is let in when it is delivered again. Waits at most five seconds while it is being handled.
-- Locks: gate (ROW SHARE), so that the epoch stands still, then the letter.
CREATE OR REPLACE FUNCTION fencepost.release_dead_letter(p_id bigint, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_letter fencepost.dead_letter;
    v_epoch bigint;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    v_letter := fencepost._lock_dead_letter(p_id);
    IF v_letter.reason <> 'old_epoch' THEN
        PERFORM fencepost._refuse('ZF003', 'it was not set aside for its epoch', 'epoch', 'retry it: fencepost deadletters retry');
    END IF;
    v_epoch := fencepost._epoch(v_letter.tenant);
    UPDATE fencepost.dead_letter AS d SET released_epoch = v_epoch, takes = 0,
        due_at = CASE WHEN d.coordinates ~ '^\["(kafka|rabbitmq)",' THEN clock_timestamp() END
    WHERE d.id = p_id;
    PERFORM fencepost._decide_dead_letter('release_dead_letter', v_letter, p_actor, p_reason, 'released under epoch ' || v_epoch);
END $$;


-- inbox/positions.sql
-- Notes how far a consumer has read partitions, after the work below is committed and before the broker is told; positions only
-- grow. Without any it says whether they could be noted. Refused while the database is not armed, and with ZF020 when it was
-- recovered since `p_recovered` was read: whoever asks then knows of work that this database may have lost.
-- A crash may forget what this wrote, never the work below it: the log is written in order.
-- Locks: gate (ROW SHARE), then the positions.
CREATE OR REPLACE FUNCTION fencepost.note_positions(
    p_consumer text, p_cluster text, p_group text, p_recovered bigint,
    p_topics text[], p_topic_ids text[], p_partitions integer[], p_nexts bigint[])
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_identity('consumer', p_consumer);
    PERFORM fencepost._enter();
    IF p_recovered IS DISTINCT FROM (SELECT i.recovered_epoch FROM fencepost.installation AS i) THEN
        PERFORM fencepost._refuse('ZF020', 'the database was restored and recovered meanwhile', 'epoch',
            'read the positions again, and go on from there');
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    INSERT INTO fencepost.consumer_position AS c (consumer, cluster, consumer_group, topic, topic_id, partition, next)
    SELECT p_consumer, p_cluster, p_group, n.topic, n.topic_id, n.partition, n.next
    FROM unnest(p_topics, p_topic_ids, p_partitions, p_nexts) AS n (topic, topic_id, partition, next)
    ORDER BY n.topic, n.topic_id, n.partition
    ON CONFLICT (consumer, cluster, consumer_group, topic, topic_id, partition)
    DO UPDATE SET next = excluded.next, noted_at = clock_timestamp() WHERE c.next < excluded.next;
END $$;

-- What every consumer had done at a recovery: how many positions it has, and the youngest event it has handled.
CREATE OR REPLACE FUNCTION fencepost._note_consumers()
RETURNS void LANGUAGE sql AS $$
    DELETE FROM fencepost.consumer_recovery;
    WITH RECURSIVE handled AS (
        -- From consumer to consumer along the index.
        (SELECT r.consumer FROM fencepost.reservation AS r ORDER BY r.consumer LIMIT 1)
        UNION ALL
        SELECT (SELECT r.consumer FROM fencepost.reservation AS r WHERE r.consumer > h.consumer ORDER BY r.consumer LIMIT 1)
        FROM handled AS h WHERE h.consumer IS NOT NULL
    ), known AS (
        SELECT h.consumer FROM handled AS h WHERE h.consumer IS NOT NULL
        UNION SELECT p.consumer FROM fencepost.consumer_position AS p
        UNION SELECT c.consumer FROM fencepost.consumer AS c
    )
    INSERT INTO fencepost.consumer_recovery (consumer, positions, noted_at, handled_until)
    SELECT k.consumer, p.count, p.noted_at, (SELECT max(r.event_time) FROM fencepost.reservation AS r WHERE r.consumer = k.consumer)
    FROM known AS k
    CROSS JOIN LATERAL (SELECT count(*) AS count, max(p.noted_at) AS noted_at FROM fencepost.consumer_position AS p
                        WHERE p.consumer = k.consumer) AS p
$$;


-- inbox/purge.sql
-- Forgetting. First the horizon is advanced and committed: from then on an older event is refused where nothing is known of it.
-- Only then are rows deleted, and a grace period behind it, so that copies which are a little late are still recognised.

-- Advances the horizon of a consumer to where its replay window begins now; null where it remembers for ever.
-- Waits at most two seconds for whoever changes the consumer's retention.
CREATE OR REPLACE FUNCTION fencepost.advance_horizon(p_consumer text)
RETURNS timestamptz LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' AS $$
DECLARE
    v_horizon timestamptz;
BEGIN
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    UPDATE fencepost.consumer AS c SET horizon = greatest(c.horizon, clock_timestamp() - c.replay_window)
    WHERE c.consumer = p_consumer AND c.replay_window IS NOT NULL RETURNING c.horizon INTO v_horizon;
    RETURN v_horizon;
END $$;

-- Deletes reservations of events from before the horizon and `p_grace`, about `p_batch` of them, above `p_after`; returns how
-- many it looked at, how many it deleted, and where to go on. Kept: types that are remembered for ever, and what was delivered
-- within the window by our own clock, since the clock of a sender may be behind.
-- Dead rows of earlier calls lie below `p_after` and are not walked over again, whatever snapshot is pinned.
-- Locks: reservations that nobody else holds; waits for nobody.
CREATE OR REPLACE FUNCTION fencepost.purge_reservations(
    p_consumer text, p_after timestamptz, p_batch integer, p_grace interval DEFAULT '1 hour',
    OUT looked integer, OUT purged integer, OUT after timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_consumer fencepost.consumer;
    v_before timestamptz;
    v_places tid[];
BEGIN
    PERFORM fencepost._enter();
    -- Invariant: reserve asks nobody about an event of the last hour.
    IF (p_grace >= interval '1 hour') IS NOT TRUE THEN
        PERFORM fencepost._refuse('ZF003', 'the grace period is less than an hour', 'grace', 'give an hour or more');
    END IF;
    SELECT c.* INTO v_consumer FROM fencepost.consumer AS c WHERE c.consumer = p_consumer;
    v_before := clock_timestamp() - v_consumer.replay_window - p_grace;
    -- Invariant: the types are read after the horizon, so that one which was declared before it was advanced is seen.
    SELECT count(*), coalesce(max(l.event_time), p_after), array_agg(l.place) FILTER (WHERE NOT l.is_kept)
    INTO looked, after, v_places
    FROM (SELECT r.ctid AS place, r.event_time, r.last_at >= v_before
                 OR EXISTS (SELECT FROM fencepost.consumer_forever AS f WHERE f.consumer = r.consumer AND f.type = r.type) AS is_kept
          FROM fencepost.reservation AS r
          WHERE r.consumer = p_consumer AND r.event_time > p_after AND r.event_time < v_consumer.horizon - p_grace
            AND v_consumer.replay_window IS NOT NULL
          ORDER BY r.event_time FETCH FIRST (p_batch) ROWS WITH TIES) AS l;
    -- Invariant: one that arrives again meanwhile is another version of its row, in another place.
    WITH gone AS (
        DELETE FROM fencepost.reservation AS r
        WHERE r.ctid = ANY (ARRAY(SELECT o.ctid FROM fencepost.reservation AS o WHERE o.ctid = ANY (v_places) AND o.last_at < v_before
                                  FOR UPDATE SKIP LOCKED)) RETURNING 1)
    SELECT count(*) INTO purged FROM gone;
END $$;

-- The same for deliveries that no reservation was made with, by the time of their arrival: a copy of one that is gone is still
-- told by its operation.
CREATE OR REPLACE FUNCTION fencepost.purge_deliveries(
    p_consumer text, p_after timestamptz, p_batch integer, p_grace interval DEFAULT '1 hour',
    OUT looked integer, OUT purged integer, OUT after timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_before timestamptz;
BEGIN
    PERFORM fencepost._enter();
    SELECT clock_timestamp() - c.replay_window - p_grace INTO v_before FROM fencepost.consumer AS c WHERE c.consumer = p_consumer;
    WITH looked AS (
        SELECT d.ctid AS place, d.first_at, d.last_at >= v_before AS is_kept
        FROM fencepost.unreserved_delivery AS d
        WHERE d.consumer = p_consumer AND d.first_at > p_after AND d.first_at < v_before
        ORDER BY d.first_at FETCH FIRST (p_batch) ROWS WITH TIES),
    gone AS (
        DELETE FROM fencepost.unreserved_delivery AS d
        WHERE d.ctid = ANY (ARRAY(SELECT l.place FROM looked AS l WHERE NOT l.is_kept)) RETURNING 1)
    SELECT (SELECT count(*) FROM looked), (SELECT count(*) FROM gone), coalesce((SELECT max(l.first_at) FROM looked AS l), p_after)
    INTO looked, purged, after;
END $$;


-- inbox/reserve.sql
-- Whether a reservation looks like nearly all of them do, and nothing of it is to be refused; anything else is judged part by
-- part. One expression without a call of its own, and of few parts, for it is made anew in every transaction; a counted
-- repetition in the pattern would cost more than all else of it. What is null makes it null.
CREATE OR REPLACE FUNCTION fencepost._is_plain_reservation(
    p_tenant text, p_consumer text, p_operation text, p_type text, p_version integer, p_event_id uuid, p_source text,
    p_epoch bigint, p_binding text, p_event_time timestamptz, p_coordinates text)
RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT (p_tenant || p_consumer || p_operation || p_type) ~ '^[!-~]+$'
       AND '' <> ALL (ARRAY[p_tenant, p_consumer, p_operation, p_type, p_source, p_coordinates])
       AND greatest(octet_length(p_tenant), octet_length(p_consumer), octet_length(p_operation), octet_length(p_type),
                    octet_length(p_source)) <= 200 AND octet_length(p_coordinates) <= 1500
       AND p_version BETWEEN 1 AND 32767 AND p_epoch >= 0 AND p_event_id IS NOT NULL AND p_event_time IS NOT NULL
       AND octet_length(p_binding) = 75 AND p_binding ~ '^jcs-sha256:[0-9a-f]+$'
$$;

-- What a reservation needs, or the refusal that names the first part that is wrong.
CREATE OR REPLACE FUNCTION fencepost._require_reservable(
    p_tenant text, p_consumer text, p_operation text, p_type text, p_version integer, p_event_id uuid, p_source text,
    p_epoch bigint, p_binding text, p_event_time timestamptz, p_coordinates text, p_headers jsonb, p_payload bytea)
RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    PERFORM fencepost._require_identity('tenant', p_tenant);
    PERFORM fencepost._require_identity('consumer', p_consumer);
    PERFORM fencepost._require_identity('operation', p_operation);
    PERFORM fencepost._require_identity('type', p_type);
    PERFORM fencepost._require_binding(p_binding);
    PERFORM fencepost._require_coordinates(p_coordinates);
    IF p_version IS NULL OR p_version NOT BETWEEN 1 AND 32767 THEN
        PERFORM fencepost._refuse('ZF003', 'version is not between 1 and 32767', 'version', NULL);
    ELSIF p_event_id IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'event_id is null', 'event_id', 'pass the id that the event arrived with');
    ELSIF p_source IS NULL OR p_source = '' OR length(p_source) > 200 THEN
        PERFORM fencepost._refuse('ZF003', 'source is empty or longer than 200 characters', 'source', NULL);
    ELSIF p_epoch IS NULL OR p_epoch < 0 THEN
        PERFORM fencepost._refuse('ZF003', 'epoch is null or negative', 'epoch', 'pass the epoch that the event arrived with');
    ELSIF p_event_time IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'event_time is null', 'event_time', 'pass the time that the event arrived with');
    ELSIF (p_headers IS NULL) <> (p_payload IS NULL) THEN
        PERFORM fencepost._refuse('ZF003', 'headers or payload are null', 'payload', 'give both, or none');
    END IF;
END $$;

-- Reserves an operation for a consumer inside the handler's transaction: committed with its changes or not at all.
-- outcome: reserved (handle it), duplicate (already handled with this meaning), conflict (kept as a dead letter with
-- both meanings, not handled), before_horizon (nothing is known of it and it is older than what is remembered: kept as a
-- dead letter, not handled), old_epoch (nothing is known of it, and it is from here and of an epoch that is over: kept as a
-- dead letter, not handled). Without headers and payload nothing can be kept: then alone says that nothing is recorded, and
-- that it has to be given once more, with them. Concurrent copies wait for the first transaction; bound it with lock_timeout,
-- or with p_wait_ms, which leaves lock_timeout as it was, and marks application_name until the transaction ends: the server
-- reports the name when it goes back, so a client sees without asking whether its transaction stands.
-- Locks: the reservation, then the delivery that has none. A copy waits, too, for whoever counts the reserved delivery again.
CREATE OR REPLACE FUNCTION fencepost.reserve(
    p_tenant text, p_consumer text, p_operation text, p_type text, p_version integer, p_event_id uuid, p_source text,
    p_epoch bigint, p_binding text, p_event_time timestamptz, p_coordinates text, p_headers jsonb, p_payload bytea,
    p_wait_ms integer DEFAULT NULL, OUT outcome text, OUT arrivals integer, OUT other_epoch boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_ordinary boolean;
    v_settings text[];
    v_ignored text;
BEGIN
    -- Few and large expressions on the way of an ordinary event: PL/pgSQL makes each of them anew in every transaction.
    -- Before the first statement that may wait: what was, what is, and the mark.
    v_settings := CASE WHEN fencepost._is_plain_reservation(p_tenant, p_consumer, p_operation, p_type, p_version, p_event_id,
                                                            p_source, p_epoch, p_binding, p_event_time, p_coordinates)
            AND (p_headers IS NULL) = (p_payload IS NULL)
            AND coalesce(p_wait_ms, 1) >= 1 AND current_setting('synchronous_commit') = 'on' THEN
        CASE WHEN p_wait_ms IS NULL THEN '{}' ELSE ARRAY[
            current_setting('lock_timeout'), set_config('lock_timeout', p_wait_ms::text, true),
            set_config('application_name', left(current_setting('application_name'), 50) || ' (inbox)', true)] END END;
    IF v_settings IS NULL THEN
        PERFORM fencepost._require_reservable(p_tenant, p_consumer, p_operation, p_type, p_version, p_event_id, p_source, p_epoch,
            p_binding, p_event_time, p_coordinates, p_headers, p_payload);
        IF p_wait_ms < 1 THEN
            PERFORM fencepost._refuse('ZF003', 'wait_ms is less than 1', 'wait_ms', NULL);
        END IF;
        -- Others act upon this commit (a broker is acked, an operator is told): it must survive a crash.
        PERFORM set_config('synchronous_commit', 'on', true);
        v_settings := CASE WHEN p_wait_ms IS NOT NULL THEN ARRAY[
            current_setting('lock_timeout'), set_config('lock_timeout', p_wait_ms::text, true),
            set_config('application_name', left(current_setting('application_name'), 50) || ' (inbox)', true)] END;
    END IF;

    -- An operation and the delivery that it was reserved with are one row: a second insertion would cost as much again.
    INSERT INTO fencepost.reservation AS r (tenant, consumer, operation, type, version, event_id, source, epoch, meaning, event_time, coordinates)
    VALUES (p_tenant, p_consumer, p_operation, p_type, p_version, p_event_id, p_source, p_epoch,
        fencepost.meaning(p_tenant, p_operation, p_type, p_version, p_binding), p_event_time, p_coordinates)
    ON CONFLICT DO NOTHING
    -- Ordinary is what nobody has to be asked about. Nothing so young was ever forgotten: purges keep a grace period of an hour
    -- at least, behind a horizon that no clock is ahead of. And its epoch is in force and its delivery new, unless the insertion
    -- has waited, or looked at an old snapshot: then all is looked at again.
    RETURNING 'reserved', 1, false, r.event_time >= clock_timestamp() - interval '1 hour'
        AND clock_timestamp() <= statement_timestamp() + interval '5 milliseconds'
        AND current_setting('transaction_isolation') = 'read committed'
        AND (SELECT p_epoch >= i.epoch_counter OR p_source <> 'urn:fencepost:' || i.id FROM fencepost.installation AS i)
        AND NOT EXISTS (SELECT FROM fencepost.unreserved_delivery AS d WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates)
    INTO outcome, arrivals, other_epoch, v_ordinary;
    IF v_ordinary IS NOT TRUE THEN
        SELECT j.* INTO outcome, arrivals, other_epoch
        FROM fencepost._judge_reservation(FOUND, p_tenant, p_consumer, p_operation, p_type, p_version, p_event_id,
            p_source, p_epoch, fencepost.meaning(p_tenant, p_operation, p_type, p_version, p_binding), p_event_time, p_coordinates,
            p_headers, p_payload) AS j;
    END IF;
    v_ignored := CASE WHEN p_wait_ms IS NOT NULL THEN set_config('lock_timeout', v_settings[1], true) END;
END $$;

-- What a reservation that is not ordinary comes to; `p_made`: the statement before has inserted it, else something was there.
CREATE OR REPLACE FUNCTION fencepost._judge_reservation(
    p_made boolean, p_tenant text, p_consumer text, p_operation text, p_type text, p_version integer, p_event_id uuid,
    p_source text, p_epoch bigint, p_meaning bytea, p_event_time timestamptz, p_coordinates text, p_headers jsonb, p_payload bytea,
    OUT outcome text, OUT arrivals integer, OUT other_epoch boolean)
LANGUAGE plpgsql AS $$
DECLARE
    v_delivery fencepost.delivery;
    v_known bytea;
    v_epoch bigint;
    v_horizon timestamptz;
BEGIN
    other_epoch := false;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- This snapshot may be older than what it is to be compared with. An insertion that meets a row which came, or was
        -- changed, after the snapshot raises 40001: of the delivery without a reservation, of the horizon, of a rotation.
        INSERT INTO fencepost.unreserved_delivery (consumer, coordinates, tenant, operation, type, meaning, event_id, arrivals)
        VALUES (p_consumer, p_coordinates, p_tenant, p_operation, p_type, p_meaning, p_event_id, 0) ON CONFLICT DO NOTHING;
        DELETE FROM fencepost.unreserved_delivery AS d
        WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates AND d.arrivals = 0;
        IF p_made THEN
            INSERT INTO fencepost.consumer (consumer) VALUES (p_consumer) ON CONFLICT DO NOTHING;
            INSERT INTO fencepost.installation SELECT i.* FROM fencepost.installation AS i
            WHERE p_source = 'urn:fencepost:' || i.id ON CONFLICT DO NOTHING;
        END IF;
    END IF;
    -- The delivery, where it was here before.
    IF NOT p_made THEN
        UPDATE fencepost.reservation AS r SET arrivals = r.arrivals + 1, last_at = clock_timestamp()
        WHERE r.consumer = p_consumer AND r.coordinates = p_coordinates
          AND (r.tenant, r.operation, r.type, r.meaning) = (p_tenant, p_operation, p_type, p_meaning)
        RETURNING 'duplicate', r.arrivals, r.epoch <> p_epoch INTO outcome, arrivals, other_epoch;
        IF FOUND THEN
            RETURN;
        END IF;
        other_epoch := false;
    END IF;
    SELECT d.* INTO v_delivery FROM fencepost.delivery AS d
    WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates AND (d.unreserved OR NOT p_made) ORDER BY d.unreserved LIMIT 1;

    IF (v_delivery.tenant, v_delivery.operation, v_delivery.type, v_delivery.meaning) <> (p_tenant, p_operation, p_type, p_meaning) THEN
        outcome := 'delivery_changed';
        v_known := v_delivery.meaning;
    ELSIF NOT p_made THEN
        SELECT r.meaning, r.epoch INTO v_known, v_epoch FROM fencepost.reservation AS r
        WHERE r.tenant = p_tenant AND r.consumer = p_consumer AND r.operation = p_operation AND r.type = p_type;
        IF NOT FOUND THEN
            RAISE serialization_failure USING MESSAGE = 'the operation was reserved after this snapshot', HINT = 'retry the transaction';
        END IF;
        outcome := CASE WHEN v_known = p_meaning THEN 'duplicate' ELSE 'conflict' END;
        other_epoch := v_known = p_meaning AND v_epoch <> p_epoch;
    ELSE
        -- Invariant: inserted first, the horizon read by a later statement. Whatever purge hid an older reservation from the
        -- insertion has committed, and its horizon before it, so this statement sees it.
        SELECT c.horizon INTO v_horizon FROM fencepost.consumer AS c WHERE c.consumer = p_consumer;
        -- Invariant: nothing from here stays reserved by a statement that begins after the commit of the rotation which ended its
        -- epoch. Who began before that commit and ends after it is like a handler that was under way: an authority that was in
        -- use already. Who is here looks again, for it may have waited for another copy in between.
        IF fencepost._is_of_old_epoch(p_tenant, p_consumer, p_source, p_epoch, p_event_id, p_meaning, p_coordinates) THEN
            outcome := 'old_epoch';
        -- A type that is kept for ever has a horizon of its own, which is no younger.
        ELSIF p_event_time < v_horizon
              AND p_event_time < coalesce((SELECT f.horizon FROM fencepost.consumer_forever AS f
                                           WHERE f.consumer = p_consumer AND f.type = p_type), v_horizon)
              AND NOT EXISTS (SELECT FROM fencepost.dead_letter AS d
                              WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates AND d.arrived_meaning = p_meaning
                                AND d.unhandled) THEN
            outcome := 'before_horizon';
        ELSE
            outcome := 'reserved';
            DELETE FROM fencepost.unreserved_delivery AS d WHERE d.consumer = p_consumer AND d.coordinates = p_coordinates
            RETURNING d.arrivals + 1 INTO arrivals;
            IF FOUND THEN
                UPDATE fencepost.reservation AS r SET arrivals = _judge_reservation.arrivals
                WHERE r.consumer = p_consumer AND r.coordinates = p_coordinates;
            ELSE
                arrivals := 1;
            END IF;
            RETURN;
        END IF;
    END IF;

    -- It is not to be handled.
    IF p_made THEN
        DELETE FROM fencepost.reservation AS r
        WHERE r.tenant = p_tenant AND r.consumer = p_consumer AND r.operation = p_operation AND r.type = p_type;
    END IF;
    IF outcome <> 'duplicate' AND p_payload IS NULL THEN
        outcome := 'alone';
        arrivals := 0;
        RETURN;
    END IF;
    IF outcome = 'delivery_changed' AND NOT v_delivery.unreserved THEN
        UPDATE fencepost.reservation AS r SET arrivals = r.arrivals + 1, last_at = clock_timestamp()
        WHERE r.consumer = p_consumer AND r.coordinates = p_coordinates RETURNING r.arrivals INTO arrivals;
    ELSE
        -- A delivery that has changed keeps the meaning that it came with at first.
        INSERT INTO fencepost.unreserved_delivery AS d (consumer, coordinates, tenant, operation, type, meaning, event_id)
        VALUES (p_consumer, p_coordinates, p_tenant, p_operation, p_type, p_meaning, p_event_id)
        ON CONFLICT (consumer, coordinates) DO UPDATE SET arrivals = d.arrivals + 1, last_at = clock_timestamp()
        WHERE outcome = 'delivery_changed'
           OR (d.tenant, d.operation, d.type, d.meaning) = (excluded.tenant, excluded.operation, excluded.type, excluded.meaning)
        RETURNING d.arrivals INTO arrivals;
    END IF;
    IF arrivals IS NULL THEN
        RAISE serialization_failure USING MESSAGE = 'the delivery was changed after this snapshot', HINT = 'retry the transaction';
    END IF;
    CASE outcome
    WHEN 'duplicate' THEN
        NULL;
    WHEN 'delivery_changed' THEN
        PERFORM fencepost._dead_letter(p_consumer, p_coordinates, 'delivery_changed', 'operation',
            'the delivery came back as another operation or with another meaning', p_tenant, p_operation, p_type, p_version,
            p_event_id, v_known, p_meaning, 1, p_headers, p_payload);
        outcome := 'conflict';
    WHEN 'conflict' THEN
        PERFORM fencepost._dead_letter(p_consumer, p_coordinates, 'conflict', 'operation',
            'the operation was already handled with another meaning', p_tenant, p_operation, p_type, p_version,
            p_event_id, v_known, p_meaning, 1, p_headers, p_payload);
    WHEN 'old_epoch' THEN
        PERFORM fencepost._dead_letter(p_consumer, p_coordinates, 'old_epoch', 'epoch',
            format('accepted here under epoch %s, and the tenant stands at epoch %s', p_epoch, fencepost._epoch(p_tenant)),
            p_tenant, p_operation, p_type, p_version, p_event_id, NULL, p_meaning, 1, p_headers, p_payload);
    WHEN 'before_horizon' THEN
        PERFORM fencepost._dead_letter(p_consumer, p_coordinates, 'before_horizon', 'event_time',
            'the event is older than what this consumer remembers, so nothing can tell whether it was handled',
            p_tenant, p_operation, p_type, p_version, p_event_id, NULL, p_meaning, 1, p_headers, p_payload);
    END CASE;
END $$;


-- inbox/reserve_many.sql
-- Invariant: a batch is reserved before its handlers run, so a commit in between would turn events that nobody has handled
-- into duplicates. Refused at that commit, whoever issues it.
CREATE OR REPLACE FUNCTION fencepost._batch_is_settled()
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM fencepost.inbox_batch AS b WHERE b.transaction = NEW.transaction) THEN
        PERFORM fencepost._refuse('ZF004', 'the transaction would end before its batch is settled', 'batch',
            'the inbox commits; do not commit in a handler');
    END IF;
    RETURN NULL;
END $$;

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgrelid = 'fencepost.inbox_batch'::regclass AND t.tgname = 'inbox_batch_is_settled') THEN
        CREATE CONSTRAINT TRIGGER inbox_batch_is_settled AFTER INSERT ON fencepost.inbox_batch
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fencepost._batch_is_settled();
    END IF;
END $$;

-- Reserves many operations for a consumer in one statement; each array has one entry for each delivery, and no operation
-- and no coordinates come twice. outcome: reserved (handle it), duplicate (already handled with this meaning), alone
-- (nothing is recorded here: give it to reserve, in a transaction of its own, which says what it is). settle_batch has to
-- follow in the same transaction.
-- Locks: new reservations, reservations that were there, deliveries that have none, each in the order of their keys, so that
-- batches of the same wait for each other in turn. A copy waits, too, for whoever counts the reserved delivery again.
CREATE OR REPLACE FUNCTION fencepost.reserve_many(
    p_consumer text, p_tenants text[], p_operations text[], p_types text[], p_versions integer[], p_event_ids uuid[],
    p_sources text[], p_epochs bigint[], p_bindings text[], p_event_times timestamptz[], p_coordinates text[])
RETURNS TABLE (n bigint, outcome text, arrivals integer, other_epoch boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count constant integer := cardinality(p_coordinates);
    v_meanings bytea[];
    v_arrivals jsonb;
    v_reserved text[];
    v_horizon timestamptz;
    v_alone text[] := '{}';
    v_known record;
BEGIN
    PERFORM fencepost._require_identity('consumer', p_consumer);
    IF v_count IS NULL OR v_count NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'a batch has 1 to 1000 deliveries', 'coordinates', 'give a smaller batch');
    ELSIF (cardinality(p_tenants), cardinality(p_operations), cardinality(p_types), cardinality(p_versions), cardinality(p_event_ids))
          IS DISTINCT FROM (v_count, v_count, v_count, v_count, v_count)
       OR (cardinality(p_sources), cardinality(p_epochs), cardinality(p_bindings), cardinality(p_event_times))
          IS DISTINCT FROM (v_count, v_count, v_count, v_count) THEN
        PERFORM fencepost._refuse('ZF003', 'the arrays have different lengths', 'coordinates', 'give one entry for each delivery');
    ELSIF (SELECT count(DISTINCT c) FROM unnest(p_coordinates) AS c) <> v_count THEN
        PERFORM fencepost._refuse('ZF003', 'coordinates come twice in a batch', 'coordinates', 'reserve the second one alone');
    ELSIF (SELECT count(*) FROM (SELECT DISTINCT o.* FROM unnest(p_tenants, p_operations, p_types) AS o) AS d) <> v_count THEN
        PERFORM fencepost._refuse('ZF003', 'an operation comes twice in a batch', 'operation', 'reserve the second one alone');
    END IF;
    IF EXISTS (SELECT FROM unnest(p_tenants, p_operations, p_types, p_versions, p_event_ids, p_sources, p_epochs, p_bindings,
                                  p_event_times, p_coordinates) AS u (t, o, y, v, e, s, p, b, at, c)
               WHERE fencepost._is_plain_reservation(u.t, p_consumer, u.o, u.y, u.v, u.e, u.s, u.p, u.b, u.at, u.c) IS NOT TRUE) THEN
        PERFORM fencepost._require_identity('tenant', t) FROM (SELECT DISTINCT unnest(p_tenants)) AS u (t);
        PERFORM fencepost._require_identity('type', t) FROM (SELECT DISTINCT unnest(p_types)) AS u (t);
        PERFORM fencepost._require_identity('operation', o), fencepost._require_binding(b), fencepost._require_coordinates(c)
        FROM unnest(p_operations, p_bindings, p_coordinates) AS u (o, b, c);
        IF EXISTS (SELECT FROM unnest(p_versions) AS v WHERE v IS NULL OR v NOT BETWEEN 1 AND 32767) THEN
            PERFORM fencepost._refuse('ZF003', 'version is not between 1 and 32767', 'version', NULL);
        ELSIF array_position(p_event_ids, NULL) IS NOT NULL THEN
            PERFORM fencepost._refuse('ZF003', 'event_id is null', 'event_id', 'pass the id that the event arrived with');
        ELSIF EXISTS (SELECT FROM unnest(p_sources) AS s WHERE s IS NULL OR s = '' OR length(s) > 200) THEN
            PERFORM fencepost._refuse('ZF003', 'source is empty or longer than 200 characters', 'source', NULL);
        ELSIF EXISTS (SELECT FROM unnest(p_epochs) AS e WHERE e IS NULL OR e < 0) THEN
            PERFORM fencepost._refuse('ZF003', 'epoch is null or negative', 'epoch', 'pass the epoch that the event arrived with');
        ELSIF array_position(p_event_times, NULL) IS NOT NULL THEN
            PERFORM fencepost._refuse('ZF003', 'event_time is null', 'event_time', 'pass the time that the event arrived with');
        END IF;
    END IF;
    -- Others act upon this commit (a broker is acked, an operator is told): it must survive a crash.
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT array_agg(fencepost.meaning(t, o, y, v, b) ORDER BY u.n) INTO v_meanings
    FROM unnest(p_tenants, p_operations, p_types, p_versions, p_bindings) WITH ORDINALITY AS u (t, o, y, v, b, n);

    WITH taken AS (
        INSERT INTO fencepost.reservation AS r (tenant, consumer, operation, type, version, event_id, source, epoch, meaning, event_time, coordinates)
        SELECT u.t, p_consumer, u.o, u.y, u.v, u.e, u.s, u.p, u.m, u.at, u.c
        FROM unnest(p_tenants, p_operations, p_types, p_versions, p_event_ids, p_sources, p_epochs, v_meanings, p_event_times,
            p_coordinates) AS u (t, o, y, v, e, s, p, m, at, c)
        WHERE NOT EXISTS (SELECT FROM fencepost.unreserved_delivery AS d WHERE d.consumer = p_consumer AND d.coordinates = u.c)
        ORDER BY u.t, u.o, u.y
        ON CONFLICT DO NOTHING
        RETURNING r.coordinates)
    SELECT coalesce(array_agg(k.coordinates), '{}') INTO v_reserved FROM taken AS k;

    -- Invariant: as in reserve, the horizon is read by a statement after the insertion.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        INSERT INTO fencepost.unreserved_delivery (consumer, coordinates, tenant, operation, type, meaning, event_id, arrivals)
        SELECT p_consumer, u.c, u.t, u.o, u.y, u.m, u.e, 0
        FROM unnest(p_coordinates, p_tenants, p_operations, p_types, v_meanings, p_event_ids) AS u (c, t, o, y, m, e)
        ORDER BY u.c ON CONFLICT DO NOTHING;
        DELETE FROM fencepost.unreserved_delivery AS d
        WHERE d.consumer = p_consumer AND d.coordinates = ANY (p_coordinates) AND d.arrivals = 0;
        INSERT INTO fencepost.consumer (consumer) VALUES (p_consumer) ON CONFLICT DO NOTHING;
        INSERT INTO fencepost.installation SELECT i.* FROM fencepost.installation AS i
        WHERE 'urn:fencepost:' || i.id = ANY (p_sources) ON CONFLICT DO NOTHING;
    END IF;
    SELECT c.horizon INTO v_horizon FROM fencepost.consumer AS c WHERE c.consumer = p_consumer;

    -- Nearly every batch is new as a whole; the horizon of a type that is kept for ever is no younger.
    -- Invariant: so are the epochs and the deliveries without a reservation, for it may have waited across a rotation, or for
    -- one of these deliveries, which was refused then (see reserve).
    IF cardinality(v_reserved) = v_count
       AND NOT EXISTS (SELECT FROM fencepost.unreserved_delivery AS d WHERE d.consumer = p_consumer AND d.coordinates = ANY (p_coordinates))
       AND NOT EXISTS (SELECT FROM unnest(p_event_times) AS u (at) WHERE u.at < v_horizon)
       AND NOT EXISTS (SELECT FROM fencepost.installation AS i CROSS JOIN unnest(p_tenants, p_sources, p_epochs) AS u (t, s, p)
                       WHERE u.s = 'urn:fencepost:' || i.id AND u.p < i.epoch_counter
                         AND u.p < greatest(i.floor, (SELECT t.epoch FROM fencepost.tenant AS t WHERE t.tenant = u.t))) THEN
        INSERT INTO fencepost.inbox_batch (transaction, consumer, reserved, counted)
        VALUES (pg_current_xact_id(), p_consumer, v_reserved, '{}');
        RETURN QUERY SELECT u.n, 'reserved'::text, 1, false FROM generate_series(1, v_count::bigint) AS u (n);
        RETURN;
    END IF;

    -- The deliveries that their operations were reserved with.
    WITH known AS (
        SELECT r.tenant, r.operation, r.type
        FROM unnest(p_tenants, p_operations, p_types, v_meanings, p_coordinates) AS u (t, o, y, m, c)
        JOIN fencepost.reservation AS r
            ON r.tenant = u.t AND r.consumer = p_consumer AND r.operation = u.o AND r.type = u.y AND r.coordinates = u.c AND r.meaning = u.m
        WHERE u.c <> ALL (v_reserved)
        ORDER BY r.tenant, r.operation, r.type FOR UPDATE OF r),
    again AS (
        UPDATE fencepost.reservation AS r SET arrivals = r.arrivals + 1, last_at = clock_timestamp() FROM known AS k
        WHERE r.tenant = k.tenant AND r.consumer = p_consumer AND r.operation = k.operation AND r.type = k.type
        RETURNING r.coordinates, r.arrivals)
    SELECT coalesce(jsonb_object_agg(a.coordinates, a.arrivals), '{}') INTO v_arrivals FROM again AS a;

    -- Other deliveries of operations that were reserved, unless they came with something else before.
    WITH copied AS (
        INSERT INTO fencepost.unreserved_delivery AS d (consumer, coordinates, tenant, operation, type, meaning, event_id)
        SELECT p_consumer, u.c, u.t, u.o, u.y, u.m, u.e
        FROM unnest(p_tenants, p_operations, p_types, v_meanings, p_event_ids, p_coordinates) AS u (t, o, y, m, e, c)
        JOIN fencepost.reservation AS r
            ON r.tenant = u.t AND r.consumer = p_consumer AND r.operation = u.o AND r.type = u.y AND r.meaning = u.m
        WHERE u.c <> ALL (v_reserved) AND NOT v_arrivals ? u.c
          AND NOT EXISTS (SELECT FROM fencepost.reservation AS k WHERE k.consumer = p_consumer AND k.coordinates = u.c)
        ORDER BY u.c
        ON CONFLICT (consumer, coordinates) DO UPDATE SET arrivals = d.arrivals + 1, last_at = clock_timestamp()
        WHERE (d.tenant, d.operation, d.type, d.meaning) = (excluded.tenant, excluded.operation, excluded.type, excluded.meaning)
        RETURNING d.coordinates, d.arrivals)
    SELECT v_arrivals || coalesce(jsonb_object_agg(k.coordinates, k.arrivals), '{}') INTO v_arrivals FROM copied AS k;

    -- All else is not counted here: alone.
    FOR v_known IN
        SELECT u.n, u.c, u.p, u.c = ANY (v_reserved) AS taken, coalesce(u.at < coalesce(f.horizon, v_horizon), false)
            OR u.s = 'urn:fencepost:' || i.id AND u.p < fencepost._epoch(u.t)
            OR EXISTS (SELECT FROM fencepost.unreserved_delivery AS d WHERE d.consumer = p_consumer AND d.coordinates = u.c) AS old, r.epoch,
            r.tenant IS NULL AND NOT EXISTS (
                SELECT FROM fencepost.delivery AS d WHERE d.consumer = p_consumer AND d.coordinates = u.c) AS gone
        FROM fencepost.installation AS i
        CROSS JOIN unnest(p_coordinates, p_tenants, p_operations, p_types, p_sources, p_epochs, p_event_times)
             WITH ORDINALITY AS u (c, t, o, y, s, p, at, n)
        LEFT JOIN fencepost.reservation AS r
            ON r.tenant = u.t AND r.consumer = p_consumer AND r.operation = u.o AND r.type = u.y
        LEFT JOIN fencepost.consumer_forever AS f ON f.consumer = p_consumer AND f.type = u.y
        ORDER BY u.n
    LOOP
        n := v_known.n;
        arrivals := coalesce((v_arrivals ->> v_known.c)::integer, v_known.taken::integer);
        other_epoch := false;
        IF v_known.taken AND NOT v_known.old THEN
            outcome := 'reserved';
        ELSIF v_known.gone THEN
            RAISE serialization_failure USING MESSAGE = 'the operation was reserved after this snapshot', HINT = 'retry the transaction';
        ELSIF arrivals > 0 AND NOT v_known.taken THEN
            outcome := 'duplicate';
            other_epoch := coalesce(v_known.epoch <> v_known.p, false);
        ELSE
            outcome := 'alone';
            arrivals := 0;
            IF v_known.taken THEN
                v_alone := v_alone || v_known.c;
            END IF;
        END IF;
        RETURN NEXT;
    END LOOP;
    DELETE FROM fencepost.reservation AS r WHERE r.consumer = p_consumer AND r.coordinates = ANY (v_alone);
    INSERT INTO fencepost.inbox_batch (transaction, consumer, reserved, counted)
    VALUES (pg_current_xact_id(), p_consumer, ARRAY(SELECT unnest(v_reserved) EXCEPT SELECT unnest(v_alone)),
        ARRAY(SELECT jsonb_object_keys(v_arrivals)));
END $$;

-- Ends a batch: what is named was not handled and is as if it had not arrived; all else commits as handled. Only what this batch
-- has reserved or counted can be named: no reservation of anybody else's is ever taken back.
CREATE OR REPLACE FUNCTION fencepost.settle_batch(p_consumer text, p_unhandled text[])
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_batch fencepost.inbox_batch;
    v_counted text[];
BEGIN
    DELETE FROM fencepost.inbox_batch AS b
    WHERE b.transaction = pg_current_xact_id_if_assigned() AND b.consumer = p_consumer RETURNING b.* INTO v_batch;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF004', 'no batch of this consumer is open in this transaction', 'batch',
            'settle once, in the transaction that reserved');
    END IF;
    IF p_unhandled = '{}' THEN
        RETURN;
    ELSIF NOT p_unhandled <@ (v_batch.reserved || v_batch.counted)
          OR cardinality(p_unhandled) <> (SELECT count(DISTINCT c) FROM unnest(p_unhandled) AS c) THEN
        PERFORM fencepost._refuse('ZF003', 'a delivery did not arrive in this batch, or comes twice', 'coordinates',
            'give those that reserve_many answered in this transaction');
    END IF;
    DELETE FROM fencepost.reservation AS r
    WHERE r.consumer = p_consumer AND r.coordinates = ANY (p_unhandled) AND r.coordinates = ANY (v_batch.reserved);
    v_counted := ARRAY(SELECT unnest(p_unhandled) INTERSECT SELECT unnest(v_batch.counted));
    UPDATE fencepost.reservation AS r SET arrivals = r.arrivals - 1
    WHERE r.consumer = p_consumer AND r.coordinates = ANY (v_counted);
    UPDATE fencepost.unreserved_delivery AS d SET arrivals = d.arrivals - 1
    WHERE d.consumer = p_consumer AND d.coordinates = ANY (v_counted);
    DELETE FROM fencepost.unreserved_delivery AS d
    WHERE d.consumer = p_consumer AND d.coordinates = ANY (v_counted) AND d.arrivals = 0;
END $$;


-- inbox/retention.sql
-- How long a consumer remembers. Nothing declared is for ever.

-- Notes how long the broker keeps what a consumer reads, in milliseconds by topic; -1 for ever.
CREATE OR REPLACE FUNCTION fencepost.note_topics(p_consumer text, p_topics jsonb)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._require_identity('consumer', p_consumer);
    INSERT INTO fencepost.consumer_topic AS t (consumer, topic, retention_ms)
    SELECT p_consumer, n.key, n.value::bigint FROM jsonb_each_text(p_topics) AS n
    ON CONFLICT (consumer, topic) DO UPDATE SET retention_ms = excluded.retention_ms, noted_at = clock_timestamp();
END $$;

-- Topics that keep events for longer than a window, as far as that was noted in the last thirty days.
CREATE OR REPLACE FUNCTION fencepost._topics_beyond(p_consumer text, p_window interval)
RETURNS text LANGUAGE sql STABLE AS $$
    SELECT string_agg(t.topic || CASE t.retention_ms WHEN -1 THEN ' for ever'
                                 ELSE ' for ' || justify_interval(make_interval(secs => t.retention_ms / 1000.0)) END, ', ' ORDER BY t.topic)
    FROM fencepost.consumer_topic AS t
    WHERE t.consumer = p_consumer AND t.noted_at > clock_timestamp() - interval '30 days'
      AND (t.retention_ms = -1 OR t.retention_ms > extract(epoch FROM p_window) * 1000)
$$;

CREATE OR REPLACE FUNCTION fencepost._decide_retention(p_consumer text, p_actor text, p_reason text, p_verdict text)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
    VALUES (gen_random_uuid(), 'inbox_retention', p_actor, p_reason, p_consumer, p_verdict)
$$;

-- Declares the replay window of a consumer; null remembers for ever from now on. What is forgotten already stays forgotten.
CREATE OR REPLACE FUNCTION fencepost.set_inbox_retention(p_consumer text, p_window interval, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_beyond text;
BEGIN
    PERFORM fencepost._require_identity('consumer', p_consumer);
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    IF p_window NOT BETWEEN interval '1 second' AND interval '100 years' THEN
        PERFORM fencepost._refuse('ZF003', 'the replay window is not between a second and a hundred years', 'replay_window',
            'or none, to remember for ever');
    END IF;
    v_beyond := fencepost._topics_beyond(p_consumer, p_window);
    IF p_window IS NOT NULL AND v_beyond IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF003', 'the replay window is shorter than what the broker keeps: ' || v_beyond, 'replay_window',
            'give at least that, or shorten the retention of the topic and start the consumer again');
    END IF;
    INSERT INTO fencepost.consumer AS c (consumer, replay_window) VALUES (p_consumer, p_window)
    ON CONFLICT (consumer) DO UPDATE SET replay_window = p_window, changed_at = clock_timestamp();
    PERFORM fencepost._decide_retention(p_consumer, p_actor, p_reason, coalesce(p_window::text, 'for ever'));
END $$;

-- Declares that operations of a type are remembered for ever by a consumer, whatever its window, or no longer.
-- Locks: the consumer's row, so that the horizon stands still meanwhile and every later purge sees the type.
CREATE OR REPLACE FUNCTION fencepost.keep_type(p_consumer text, p_type text, p_forever boolean, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_identity('consumer', p_consumer);
    PERFORM fencepost._require_identity('type', p_type);
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    INSERT INTO fencepost.consumer AS c (consumer) VALUES (p_consumer)
    ON CONFLICT (consumer) DO UPDATE SET changed_at = clock_timestamp();
    IF p_forever THEN
        INSERT INTO fencepost.consumer_forever (consumer, type, horizon)
        SELECT c.consumer, p_type, c.horizon FROM fencepost.consumer AS c WHERE c.consumer = p_consumer
        ON CONFLICT DO NOTHING;
    ELSE
        DELETE FROM fencepost.consumer_forever AS f WHERE f.consumer = p_consumer AND f.type = p_type;
    END IF;
    PERFORM fencepost._decide_retention(p_consumer, p_actor, p_reason,
        p_type || CASE WHEN p_forever THEN ' for ever' ELSE ' like the others' END);
END $$;


-- inbox/retry_dead_letter.sql
-- Giving a dead letter back to its consumer: an operator marks it due, the consumer takes it and handles it through its
-- inbox, and the transaction that handles it is the one that settles it.

CREATE OR REPLACE FUNCTION fencepost._decide_dead_letter(
    p_kind text, p_letter fencepost.dead_letter, p_actor text, p_reason text, p_verdict text)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, tenant, operation, subject, verdict, evidence_kind, evidence_ref)
    VALUES (gen_random_uuid(), p_kind, p_actor, p_reason, p_letter.tenant, p_letter.operation, 'dead letter ' || p_letter.id, p_verdict,
            p_letter.reason, format('%s %s sha256:%s', p_letter.consumer, p_letter.coordinates, encode(p_letter.content, 'hex')))
$$;

-- The letter, locked; refused when there is none.
CREATE OR REPLACE FUNCTION fencepost._lock_dead_letter(p_id bigint)
RETURNS fencepost.dead_letter LANGUAGE plpgsql AS $$
DECLARE
    v_letter fencepost.dead_letter;
BEGIN
    SELECT d.* INTO v_letter FROM fencepost.dead_letter AS d WHERE d.id = p_id FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such dead letter', 'id',
            'it was handled or discarded meanwhile; see: fencepost deadletters list');
    END IF;
    RETURN v_letter;
END $$;

-- Marks a dead letter due: its consumer handles it in its idle time. What is older than the purge horizon is refused, unless
-- the operator says that it was not handled before. Waits at most five seconds while the letter is being handled.
CREATE OR REPLACE FUNCTION fencepost.retry_dead_letter(p_id bigint, p_unhandled boolean, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_letter fencepost.dead_letter;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    v_letter := fencepost._lock_dead_letter(p_id);
    IF v_letter.reason = 'old_epoch' THEN
        PERFORM fencepost._refuse('ZF003', 'it was accepted under an older epoch of this installation', 'epoch',
            'an authority admin may release it: fencepost deadletters release; or discard it');
    ELSIF v_letter.coordinates !~ '^\["(kafka|rabbitmq)",' THEN
        PERFORM fencepost._refuse('ZF003', 'it was reserved by a caller with a transaction of its own', 'coordinates',
            'have its sender deliver it again, or discard it');
    ELSIF coalesce(p_unhandled, false) <> (v_letter.reason = 'before_horizon') THEN
        PERFORM fencepost._refuse('ZF003',
            CASE WHEN p_unhandled THEN 'only what is older than the purge horizon can be declared unhandled'
                 ELSE 'it is older than the purge horizon: nothing here can tell whether it was handled' END, 'unhandled',
            CASE WHEN p_unhandled THEN 'retry it without that' ELSE 'retry it with --unhandled if you know that it was not, or discard it' END);
    END IF;
    UPDATE fencepost.dead_letter AS d SET due_at = clock_timestamp(), takes = 0, unhandled = d.unhandled OR coalesce(p_unhandled, false)
    WHERE d.id = p_id;
    PERFORM fencepost._decide_dead_letter('retry_dead_letter', v_letter, p_actor, p_reason,
        CASE WHEN p_unhandled THEN 'due, declared unhandled' ELSE 'due' END);
END $$;

-- Takes one due letter of a consumer, none on a disarmed database: what was due when a copy was made is not due in the copy.
-- Committed at once, before anything is handled, so that one which brings its process down is met again only after `p_lease`,
-- and after `p_takes` times by nobody until an operator says so again.
CREATE OR REPLACE FUNCTION fencepost.take_dead_letter(
    p_consumer text, p_lease interval, p_takes integer, OUT id bigint, OUT coordinates text, OUT headers jsonb, OUT payload bytea)
RETURNS SETOF record LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    LOCK TABLE fencepost.gate IN ROW SHARE MODE;
    IF NOT fencepost.armed() THEN
        RETURN;
    END IF;
    RETURN QUERY
    UPDATE fencepost.dead_letter AS d
    SET takes = d.takes + 1, due_at = CASE WHEN d.takes + 1 < p_takes THEN clock_timestamp() + p_lease END
    WHERE d.id = (SELECT f.id FROM fencepost.dead_letter AS f
                  WHERE f.consumer = p_consumer AND f.due_at <= now()
                  ORDER BY f.due_at LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING d.id, d.coordinates, d.headers, d.payload;
END $$;

-- Settles a letter that was taken, in the transaction that handles it and before its handler runs. Reserved or a duplicate: it
-- goes. Set aside again: of the letters of this delivery the youngest stays, and is not due.
-- Locks: the letter, so that an operator's act on it waits for the handler, and the other way round.
CREATE OR REPLACE FUNCTION fencepost.settle_dead_letter(p_id bigint, p_consumer text, p_gone boolean)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_letter fencepost.dead_letter;
    v_youngest bigint;
BEGIN
    PERFORM set_config('synchronous_commit', 'on', true);
    v_letter := fencepost._lock_dead_letter(p_id);
    IF v_letter.consumer IS DISTINCT FROM p_consumer THEN
        PERFORM fencepost._refuse('ZF003', 'the dead letter is another consumer''s', 'consumer', NULL);
    END IF;
    IF NOT p_gone THEN
        SELECT d.id INTO v_youngest FROM fencepost.dead_letter AS d
        WHERE d.consumer = v_letter.consumer AND d.coordinates = v_letter.coordinates AND d.content = v_letter.content
        ORDER BY d.last_at DESC, d.id DESC LIMIT 1;
        UPDATE fencepost.dead_letter AS d
        SET due_at = NULL, unhandled = d.unhandled OR v_letter.unhandled,
            released_epoch = greatest(d.released_epoch, v_letter.released_epoch),
            attempts = d.attempts + CASE WHEN d.id = p_id THEN 0 ELSE v_letter.attempts END
        WHERE d.id = v_youngest;
    END IF;
    DELETE FROM fencepost.dead_letter AS d WHERE d.id = p_id AND d.id IS DISTINCT FROM v_youngest;
END $$;


-- jobs/agenda.sql
-- Whenever a job becomes queued, or is queued anew at another time, priority or epoch, the agenda points to it; whoever
-- made it so. So does a lease that became shorter, which only an operator or a test does by hand.
CREATE OR REPLACE FUNCTION fencepost._agenda()
RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fencepost.agenda (class, priority, due, tenant, operation, generation, epoch, fair_class)
    VALUES (NEW.class, CASE NEW.exec WHEN 'queued' THEN NEW.priority ELSE 2147483647 END,
        greatest(CASE NEW.exec WHEN 'queued' THEN NEW.run_at ELSE NEW.lease_until END, clock_timestamp()),
        NEW.tenant, NEW.operation, NEW.generation, NEW.epoch,
        CASE NEW.exec WHEN 'queued' THEN (SELECT k.class FROM fencepost.job_class AS k WHERE k.class = NEW.class AND k.fair) END);
    -- Rings only while a worker sleeps (see doze_jobs), and for what is due; one look at a sequence otherwise.
    IF NEW.exec = 'queued' AND pg_sequence_last_value('fencepost.job_doorbell') > 0 AND NEW.run_at <= clock_timestamp() THEN
        PERFORM fencepost._ring_jobs();
    END IF;
    RETURN NULL;
END $$;
-- Locks: none where the triggers exist.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'fencepost.job'::regclass AND tgname = 'agenda_insert') THEN
        CREATE TRIGGER agenda_insert AFTER INSERT ON fencepost.job FOR EACH ROW
        WHEN (NEW.exec = 'queued') EXECUTE FUNCTION fencepost._agenda();
    END IF;
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'fencepost.job'::regclass AND tgname = 'agenda_update') THEN
        CREATE TRIGGER agenda_update AFTER UPDATE ON fencepost.job FOR EACH ROW
        WHEN (NEW.exec = 'queued' AND (OLD.exec <> 'queued' OR NEW.run_at <> OLD.run_at OR NEW.priority <> OLD.priority
                                       OR NEW.epoch <> OLD.epoch OR NEW.generation <> OLD.generation)
              OR NEW.lease_until < OLD.lease_until)
        EXECUTE FUNCTION fencepost._agenda();
    END IF;
END $$;

-- The priorities of a class that hold jobs: those that the marks name, from their marks on, and those between them that have
-- come since. Walks over nothing that lies in a priority with a mark.
CREATE OR REPLACE FUNCTION fencepost._priorities(p_class text, p_marks jsonb)
RETURNS TABLE (priority integer, mark timestamptz) LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
    WITH RECURSIVE known AS MATERIALIZED (
        SELECT m.key::integer AS priority, m.value::timestamptz AS mark
        FROM jsonb_each_text(coalesce(p_marks -> 'priorities' -> p_class, '{}')) AS m WHERE m.key::integer < 2147483646
    ), gap (low, high) AS (
        SELECT e.priority, lead(e.priority, 1, 2147483646) OVER (ORDER BY e.priority)
        FROM (SELECT k.priority FROM known AS k UNION ALL SELECT -2147483648) AS e
    ), found (priority, high) AS (
        SELECT f.priority, g.high FROM gap AS g, LATERAL (
            SELECT a.priority FROM fencepost.agenda AS a
            WHERE a.class = p_class AND a.priority > g.low AND a.priority < g.high ORDER BY a.priority LIMIT 1) AS f
        UNION ALL
        SELECT f.priority, n.high FROM found AS n, LATERAL (
            SELECT a.priority FROM fencepost.agenda AS a
            WHERE a.class = p_class AND a.priority > n.priority AND a.priority < n.high ORDER BY a.priority LIMIT 1) AS f
    )
    SELECT k.priority, k.mark FROM known AS k UNION ALL SELECT f.priority, '-infinity' FROM found AS f ORDER BY 1 DESC;
END $$;

-- Up to where the agenda is used up, by class and priority, for the next claims: what is behind a mark is gone for good, and
-- no claim needs to walk over it, whatever snapshots are held. A hint and nothing more: without it, with an old one or a
-- wrong one a claim takes no job that it may not take. Give back what the last call returned; start anew without it now
-- and then, which also finds what a clock that was set back may have hidden. Call it in a transaction of its own.
-- Invariant: a mark never passes a row that is there, nor the time at which this function last noted its transaction;
-- whoever wrote before that has ended by then, and whoever wrote after it wrote rows that were due later.
CREATE OR REPLACE FUNCTION fencepost.marks(p_classes text[], p_marks jsonb DEFAULT NULL)
RETURNS jsonb LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_noted timestamptz := (p_marks ->> 'noted')::timestamptz;
    v_class text;
    v_priorities jsonb := '{}';
BEGIN
    IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
        RETURN p_marks;
    ELSIF v_noted IS NOT NULL AND (v_noted > v_now OR pg_snapshot_xmin(pg_current_snapshot()) < (p_marks ->> 'xid')::xid8) THEN
        -- A writer of that time is still at work; or the clock went back, and nothing that was noted holds.
        RETURN CASE WHEN v_noted > v_now THEN NULL ELSE p_marks END;
    END IF;
    IF v_noted IS NOT NULL THEN
        FOR v_class IN SELECT DISTINCT u.class FROM unnest(p_classes) AS u (class) LOOP
            PERFORM fencepost._forget_pointers(v_class, l.priority, l.mark, v_now) FROM fencepost._priorities(v_class, p_marks) AS l;
            -- Also of priorities that hold nothing at this moment: the default, and those of the newest claims.
            v_priorities := v_priorities || jsonb_build_object(v_class, (
                SELECT jsonb_object_agg(l.priority, least(v_noted, f.due)) FROM (
                    SELECT k.priority, max(k.mark) AS mark FROM (
                        SELECT p.priority, p.mark FROM fencepost._priorities(v_class, p_marks) AS p
                        UNION ALL
                        SELECT r.n, (p_marks -> 'priorities' -> v_class ->> r.n::text)::timestamptz FROM (VALUES (2147483646), (2147483647)) AS r (n)
                        UNION ALL
                        SELECT 0, '-infinity'
                        UNION ALL
                        SELECT j.priority, '-infinity' FROM (
                            SELECT a.tenant, a.operation FROM fencepost.agenda AS a
                            WHERE a.class = v_class AND a.priority = 2147483647 ORDER BY a.due DESC LIMIT 100) AS c
                        CROSS JOIN LATERAL (
                            SELECT i.priority FROM fencepost.job AS i
                            WHERE i.tenant = c.tenant AND i.operation = c.operation AND i.class = v_class OFFSET 0) AS j) AS k
                    GROUP BY k.priority) AS l
                LEFT JOIN LATERAL (
                    SELECT a.due FROM fencepost.agenda AS a
                    WHERE a.class = v_class AND a.priority = l.priority AND a.due >= coalesce(l.mark, '-infinity')
                    ORDER BY a.due LIMIT 1) AS f ON true));
        END LOOP;
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    RETURN jsonb_build_object('noted', v_now, 'xid', pg_current_xact_id()::text, 'priorities', v_priorities);
END $$;

-- Removes pointers of a priority that no longer fit their job (it was cancelled, queued anew, released under another epoch, or
-- is held under an old one: its release points to it again), among the first of it, and further on where all of these were such.
-- In a class that is fair, marks those from transactions that began before it was.
CREATE OR REPLACE FUNCTION fencepost._forget_pointers(p_class text, p_priority integer, p_mark timestamptz, p_now timestamptz)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_limit integer;
    v_count integer;
BEGIN
    FOREACH v_limit IN ARRAY ARRAY[100, 10000] LOOP
        -- Invariant: a pointer that was stale in one snapshot stays so; a job queued since then has another.
        DELETE FROM fencepost.agenda AS x WHERE x.ctid = ANY (ARRAY(
            SELECT a.ctid FROM fencepost.agenda AS a
            LEFT JOIN LATERAL (
                SELECT i.exec, i.generation, i.priority, i.run_at, i.epoch FROM fencepost.job AS i
                WHERE i.tenant = a.tenant AND i.operation = a.operation AND i.class = a.class OFFSET 0) AS j ON true
            WHERE a.ctid = ANY (ARRAY(
                SELECT h.ctid FROM fencepost.agenda AS h
                WHERE h.class = p_class AND h.priority = p_priority AND h.due >= p_mark AND h.due <= p_now ORDER BY h.due LIMIT v_limit))
              AND (j.exec = 'queued' AND j.generation = a.generation AND j.priority = a.priority AND j.run_at <= p_now
                   AND j.epoch = a.epoch AND j.epoch >= fencepost._epoch(a.tenant)) IS NOT TRUE
            FOR UPDATE OF a SKIP LOCKED));
        GET DIAGNOSTICS v_count = ROW_COUNT;
        EXIT WHEN v_count < v_limit;
    END LOOP;
    UPDATE fencepost.agenda AS x SET fair_class = p_class WHERE x.ctid = ANY (ARRAY(
        SELECT a.ctid FROM fencepost.agenda AS a
        WHERE a.fair_class IS NULL AND a.ctid = ANY (ARRAY(
            SELECT h.ctid FROM fencepost.agenda AS h
            WHERE h.class = p_class AND h.priority = p_priority AND h.due >= p_mark AND h.due <= p_now ORDER BY h.due LIMIT 1000))
        FOR UPDATE OF a SKIP LOCKED))
      AND (SELECT k.fair FROM fencepost.job_class AS k WHERE k.class = p_class);
END $$;


-- jobs/append_only.sql
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


-- jobs/archive.sql
-- Finished jobs: out of the tables that are worked with, into the archive, and out of that when its time is over too.

-- Done, or cancelled and nobody else's, with nothing open or doubtful about it, for longer than that. The caller looks at the
-- effects, in which there may be evidence against a job that is done.
CREATE OR REPLACE FUNCTION fencepost._finished(p_job fencepost.job, p_keep interval)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT p_job.archived_at IS NULL
       AND (p_job.exec = 'done' OR p_job.exec = 'cancelled' AND p_job.reason IS DISTINCT FROM 'transferred')
       AND p_job.open_effects = 0 AND NOT p_job.suspect AND p_job.changed_at < statement_timestamp() - p_keep
$$;

-- The partition of this month, made where it is not there.
-- Locks: the archive, where it is made; waits for those who write to it.
CREATE OR REPLACE FUNCTION fencepost._make_archive()
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_first constant timestamptz := date_trunc('month', now(), 'UTC');
    v_name constant text := 'archive_' || to_char(v_first AT TIME ZONE 'UTC', 'YYYY_MM');
BEGIN
    IF to_regclass('fencepost.' || v_name) IS NULL THEN
        LOCK TABLE fencepost.archive IN SHARE ROW EXCLUSIVE MODE;
        EXECUTE format('CREATE TABLE IF NOT EXISTS fencepost.%I PARTITION OF fencepost.archive FOR VALUES FROM (%L) TO (%L)',
            v_name, v_first, (v_first AT TIME ZONE 'UTC' + interval '1 month') AT TIME ZONE 'UTC');
    END IF;
END $$;

-- Moves finished jobs that are older than their class keeps them into the archive, `p_limit` at most, each whole; killed before
-- its commit it has moved none. The job stays as the identity of its operation, its effects and operators' decisions stay as they are: the same
-- operation is never new, late evidence is taken as ever. Looks at the jobs of a few pages of attempts and holds, from
-- `p_after` (at first 0) on; `after` is where to go on, null at the end.
-- Invariant: whatever is deleted is what is archived, in the same statement; a job is looked at after it is locked.
-- Locks: gate, then jobs and attempts that nobody else holds; waits for nobody but whoever makes the month's partition.
CREATE OR REPLACE FUNCTION fencepost.archive_jobs(p_after bigint, p_limit integer, OUT archived integer, OUT after bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s'
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_end constant bigint := p_after + 64;
    v_from tid;
    v_to tid;
    v_found record;
    v_seen record;
    v_held uuid[];
    v_busy record;
    v_jobs record;
    v_table text;
BEGIN
    IF p_after IS NULL OR p_after NOT BETWEEN 0 AND 4294967000 THEN
        PERFORM fencepost._refuse('ZF003', 'after is not where a call ended', 'after', 'begin with 0');
    ELSIF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'limit is not between 1 and 1000', 'limit', NULL);
    ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM fencepost._refuse('ZF004', 'an older snapshot may not show what came late', 'isolation', 'use a read committed transaction');
    END IF;
    PERFORM fencepost._enter();
    archived := 0;
    v_from := format('(%s,0)', p_after)::tid;
    v_to := format('(%s,0)', v_end)::tid;
    SELECT array_agg(f.tenant) AS tenants, array_agg(f.operation) AS operations, array_agg(f.class) AS classes INTO v_found FROM (
        SELECT s.tenant, s.operation, s.class FROM (
            SELECT a.tenant, a.operation, a.class FROM fencepost.attempt AS a WHERE a.ctid >= v_from AND a.ctid < v_to
            UNION
            SELECT h.tenant, h.operation, h.class FROM fencepost.job_hold AS h
            WHERE h.ctid >= v_from AND h.ctid < v_to AND h.state = 'cancelled'
            ORDER BY 1, 2, 3) AS s
        JOIN fencepost.job_retention AS r ON r.class = s.class
        CROSS JOIN LATERAL (
            SELECT FROM fencepost.job AS k
            WHERE k.tenant = s.tenant AND k.operation = s.operation AND k.class = s.class AND fencepost._finished(k, r.finished_keep)
              AND NOT EXISTS (SELECT FROM fencepost.effect AS e
                              WHERE e.tenant = k.tenant AND e.operation = k.operation AND e.class = k.class
                                AND e.state IN ('pending', 'unknown'))
            FOR NO KEY UPDATE SKIP LOCKED) AS j
        LIMIT p_limit) AS f;
    IF v_found.tenants IS NOT NULL THEN
        -- Every attempt of a job has ended in one of its events or in its completion.
        SELECT array_agg(i.tenant) AS tenants, array_agg(i.attempt) AS attempts INTO v_seen FROM (
            SELECT u.tenant, l.attempt FROM unnest(v_found.tenants, v_found.operations, v_found.classes) AS u (tenant, operation, class)
            CROSS JOIN LATERAL (
                SELECT v.attempt FROM fencepost.job_event AS v
                WHERE v.tenant = u.tenant AND v.operation = u.operation AND v.class = u.class
                UNION ALL
                SELECT s.attempt FROM fencepost.staged AS s
                WHERE s.tenant = u.tenant AND s.operation = u.operation AND s.class = u.class
                UNION ALL
                SELECT k.done_attempt FROM fencepost.job AS k
                WHERE k.tenant = u.tenant AND k.operation = u.operation AND k.class = u.class) AS l
            WHERE l.attempt IS NOT NULL
            GROUP BY 1, 2) AS i;
        -- Who stages a result holds the attempt; that job is left for the next time.
        SELECT coalesce(array_agg(l.attempt), '{}') INTO v_held
        FROM unnest(v_seen.tenants, v_seen.attempts) AS i (tenant, attempt)
        CROSS JOIN LATERAL (
            SELECT a.attempt FROM fencepost.attempt AS a
            WHERE a.tenant = i.tenant AND a.attempt = i.attempt FOR UPDATE SKIP LOCKED) AS l;
        SELECT coalesce(array_agg(l.tenant), '{}') AS tenants, array_agg(l.operation) AS operations, array_agg(l.class) AS classes
        INTO v_busy FROM unnest(v_seen.tenants, v_seen.attempts) AS i (tenant, attempt)
        CROSS JOIN LATERAL (
            SELECT a.tenant, a.operation, a.class FROM fencepost.attempt AS a
            WHERE a.tenant = i.tenant AND a.attempt = i.attempt OFFSET 0) AS l
        WHERE i.attempt <> ALL (v_held);
        SELECT array_agg(u.tenant) AS tenants, array_agg(u.operation) AS operations, array_agg(u.class) AS classes INTO v_jobs
        FROM unnest(v_found.tenants, v_found.operations, v_found.classes) AS u (tenant, operation, class)
        JOIN fencepost.job_retention AS r ON r.class = u.class
        CROSS JOIN LATERAL (
            SELECT FROM fencepost.job AS k
            WHERE k.tenant = u.tenant AND k.operation = u.operation AND k.class = u.class AND fencepost._finished(k, r.finished_keep)
            OFFSET 0) AS j
        WHERE NOT EXISTS (SELECT FROM fencepost.effect AS e
                          WHERE e.tenant = u.tenant AND e.operation = u.operation AND e.class = u.class
                            AND e.state IN ('pending', 'unknown'))
          AND (u.tenant, u.operation, u.class) NOT IN (
              SELECT b.tenant, b.operation, b.class
              FROM unnest(v_busy.tenants, v_busy.operations, v_busy.classes) AS b (tenant, operation, class));
        IF v_jobs.tenants IS NOT NULL THEN
            archived := cardinality(v_jobs.tenants);
            PERFORM fencepost._make_archive();
            -- Tells append_only that rows may go; archived_only looks at each of them, whoever says so.
            PERFORM set_config('fencepost.archiving', pg_current_xact_id()::text, true);
            INSERT INTO fencepost.archive (archived_at, tenant, operation, class, kind, content)
            SELECT now(), j.tenant, j.operation, j.class, 'job', to_jsonb(j)
            FROM unnest(v_jobs.tenants, v_jobs.operations, v_jobs.classes) AS u (tenant, operation, class)
            JOIN fencepost.job AS j ON j.tenant = u.tenant AND j.operation = u.operation AND j.class = u.class;
            -- What is staged refers to its attempt, so it goes first.
            FOREACH v_table IN ARRAY ARRAY['staged', 'publication', 'job_event', 'signal', 'wait', 'progress', 'result'] LOOP
                EXECUTE format($move$
                    WITH gone AS (
                        DELETE FROM fencepost.%1$I AS g USING unnest($1, $2, $3) AS u (tenant, operation, class)
                        WHERE g.tenant = u.tenant AND g.operation = u.operation AND g.class = u.class RETURNING g.*)
                    INSERT INTO fencepost.archive (archived_at, tenant, operation, class, kind, content)
                    SELECT now(), g.tenant, g.operation, g.class, %1$L, to_jsonb(g) FROM gone AS g $move$, v_table)
                USING v_jobs.tenants, v_jobs.operations, v_jobs.classes;
            END LOOP;
            WITH gone AS (
                DELETE FROM fencepost.attempt AS a USING unnest(v_seen.tenants, v_seen.attempts) AS i (tenant, attempt)
                WHERE a.tenant = i.tenant AND a.attempt = i.attempt
                  AND (a.tenant, a.operation, a.class) IN (
                      SELECT u.tenant, u.operation, u.class
                      FROM unnest(v_jobs.tenants, v_jobs.operations, v_jobs.classes) AS u (tenant, operation, class))
                RETURNING a.*)
            INSERT INTO fencepost.archive (archived_at, tenant, operation, class, kind, content)
            SELECT now(), g.tenant, g.operation, g.class, 'attempt', to_jsonb(g) FROM gone AS g;
            DELETE FROM fencepost.job_hold AS h USING unnest(v_jobs.tenants, v_jobs.operations, v_jobs.classes) AS u (tenant, operation, class)
            WHERE h.tenant = u.tenant AND h.operation = u.operation AND h.class = u.class;
            UPDATE fencepost.job AS j SET args = '', archived_at = now()
            FROM unnest(v_jobs.tenants, v_jobs.operations, v_jobs.classes) AS u (tenant, operation, class)
            WHERE j.tenant = u.tenant AND j.operation = u.operation AND j.class = u.class;
        END IF;
    END IF;
    -- As many as were asked for: there may be more of them here.
    after := CASE WHEN archived = p_limit THEN p_after ELSE v_end END;
    IF after * current_setting('block_size')::bigint
       >= greatest(pg_relation_size('fencepost.attempt'), pg_relation_size('fencepost.job_hold')) THEN
        after := NULL;
        UPDATE fencepost.job_retention SET passed_at = clock_timestamp();
    END IF;
END $$;

-- What `archive_jobs` would move now, by class, as far as it is worth counting.
CREATE OR REPLACE FUNCTION fencepost.finished_jobs(p_most integer)
RETURNS TABLE (class text, finished_keep interval, jobs bigint, oldest timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT r.class, r.finished_keep, count(f.at), min(f.at) FROM fencepost.job_retention AS r
    LEFT JOIN LATERAL (
        SELECT k.changed_at AS at FROM (
            SELECT a.tenant, a.operation FROM fencepost.attempt AS a WHERE a.class = r.class
            UNION
            SELECT h.tenant, h.operation FROM fencepost.job_hold AS h WHERE h.class = r.class AND h.state = 'cancelled') AS s
        JOIN fencepost.job AS k ON k.tenant = s.tenant AND k.operation = s.operation AND k.class = r.class
        WHERE fencepost._finished(k, r.finished_keep)
          AND NOT EXISTS (SELECT FROM fencepost.effect AS e
                          WHERE e.tenant = k.tenant AND e.operation = k.operation AND e.class = k.class
                            AND e.state IN ('pending', 'unknown'))
        LIMIT p_most) AS f ON true
    GROUP BY r.class ORDER BY r.class
$$;

-- Drops the months of the archive that have been over for longer than it keeps them; returns their names. With `p_dry` only that.
-- Locks: gate, then the archive; waits two seconds at most for those who write to it or read it.
CREATE OR REPLACE FUNCTION fencepost.drop_archives(p_dry boolean)
RETURNS SETOF text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' AS $$
DECLARE
    v_name text;
BEGIN
    PERFORM fencepost._enter();
    FOR v_name IN
        SELECT c.relname FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid CROSS JOIN fencepost.archive_retention AS r
        WHERE i.inhparent = 'fencepost.archive'::regclass AND c.relname ~ '^archive_\d{4}_\d\d$'
          AND (to_date(substr(c.relname, 9), 'YYYY_MM') + interval '1 month') AT TIME ZONE 'UTC' < clock_timestamp() - r.archive_keep
        ORDER BY c.relname
    LOOP
        IF NOT p_dry THEN
            EXECUTE format('DROP TABLE fencepost.%I', v_name);
        END IF;
        RETURN NEXT v_name;
    END LOOP;
END $$;

-- Declares how long finished jobs of a class stay as they are; null: for ever.
CREATE OR REPLACE FUNCTION fencepost.set_job_retention(p_class text, p_keep interval, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    IF p_keep NOT BETWEEN interval '1 hour' AND interval '100 years' THEN
        PERFORM fencepost._refuse('ZF003', 'finished jobs stay between an hour and a hundred years', 'finished_keep', 'or for ever');
    ELSIF NOT EXISTS (SELECT FROM fencepost.job_class AS k WHERE k.class = p_class) THEN
        PERFORM fencepost._refuse('ZF051', 'this class is not registered', 'class', 'see: fencepost jobs queues');
    END IF;
    IF p_keep IS NULL THEN
        DELETE FROM fencepost.job_retention AS r WHERE r.class = p_class;
    ELSE
        INSERT INTO fencepost.job_retention AS r (class, finished_keep) VALUES (p_class, p_keep)
        ON CONFLICT (class) DO UPDATE SET finished_keep = p_keep, changed_at = clock_timestamp();
    END IF;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
    VALUES (gen_random_uuid(), 'retention', p_actor, p_reason, 'finished ' || p_class, coalesce(p_keep::text, 'for ever'));
END $$;

-- Declares how long the archive keeps what it was given; null: for ever.
CREATE OR REPLACE FUNCTION fencepost.set_archive_retention(p_keep interval, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    IF p_keep NOT BETWEEN interval '1 day' AND interval '100 years' THEN
        PERFORM fencepost._refuse('ZF003', 'the archive keeps between a day and a hundred years', 'archive_keep', 'or for ever');
    END IF;
    IF p_keep IS NULL THEN
        DELETE FROM fencepost.archive_retention;
    ELSE
        INSERT INTO fencepost.archive_retention AS r (archive_keep) VALUES (p_keep)
        ON CONFLICT (singleton) DO UPDATE SET archive_keep = p_keep, changed_at = clock_timestamp();
    END IF;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
    VALUES (gen_random_uuid(), 'retention', p_actor, p_reason, 'archive of jobs', coalesce(p_keep::text, 'for ever'));
END $$;

-- Invariant: history leaves for the archive only, and only what is there word for word.
CREATE OR REPLACE FUNCTION fencepost._archived_only()
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM gone AS g
               WHERE NOT EXISTS (SELECT FROM fencepost.archive AS a
                                 WHERE a.archived_at = now() AND a.tenant = g.tenant AND a.operation = g.operation
                                   AND a.class = g.class AND a.kind = TG_TABLE_NAME AND a.content = to_jsonb(g))) THEN
        PERFORM fencepost._refuse('ZF003', TG_TABLE_NAME || ' is append-only', TG_TABLE_NAME, 'history is never changed');
    END IF;
    RETURN NULL;
END $$;
-- Locks: none where the triggers exist.
DO $$
DECLARE
    v_table text;
BEGIN
    FOREACH v_table IN ARRAY ARRAY['attempt', 'staged', 'publication', 'signal', 'result', 'job_event'] LOOP
        IF NOT EXISTS (SELECT FROM pg_trigger
                       WHERE tgrelid = format('fencepost.%I', v_table)::regclass AND tgname = 'archived_only') THEN
            EXECUTE format('CREATE TRIGGER archived_only AFTER DELETE ON fencepost.%I REFERENCING OLD TABLE AS gone '
                           'FOR EACH STATEMENT EXECUTE FUNCTION fencepost._archived_only()', v_table);
        END IF;
    END LOOP;
END $$;

-- What the archive has of jobs, without what they were given, computed, were told and returned.
CREATE OR REPLACE VIEW fencepost.archived AS
    SELECT a.tenant, a.operation, a.class, a.archived_at, a.kind, a.content - '{args,result,payload}'::text[] AS content
    FROM fencepost.archive AS a;


-- jobs/cancel.sql
-- Takes authority away, not history: advances the generation, clears the lease, leaves effects as they are.
-- Returns cancelled, already_cancelled, or too_late (done).
-- Locks: gate, then the job row: a cancel and a completion are ordered, one of them wins and both say so.
CREATE OR REPLACE FUNCTION fencepost.cancel(p_tenant text, p_operation text, p_class text, p_actor text, p_reason text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_exec text;
    v_reason text;
    v_detail text;
    v_verdict text := 'cancelled';
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    -- Others act upon this commit (a broker is acked, an operator is told): it must survive a crash.
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT j.exec, j.reason, j.detail INTO v_exec, v_reason, v_detail FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF050', 'there is no such job', 'operation', 'check tenant, operation and class');
    ELSIF v_exec = 'done' THEN
        RETURN 'too_late';
    ELSIF v_exec = 'cancelled' AND v_reason = 'transferred' THEN
        PERFORM fencepost._refuse('ZF060', 'the job was taken over by ' || v_detail, 'operation', 'cancel it there, or let it be given back');
    ELSIF v_exec = 'cancelled' THEN
        RETURN 'already_cancelled';
    END IF;
    UPDATE fencepost.job AS j SET exec = 'cancelled', generation = j.generation + 1, attempt = NULL, owner = NULL,
        lease_until = NULL, reason = 'cancelled', detail = p_reason, changed_at = clock_timestamp()
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, tenant, operation, subject, verdict)
    VALUES (gen_random_uuid(), 'cancel', p_actor, p_reason, p_tenant, p_operation, p_class, v_verdict);
    RETURN v_verdict;
END $$;

-- Gives poison or cancelled work a fresh budget, on an operator's word; refused while an effect is open.
CREATE OR REPLACE FUNCTION fencepost.requeue(p_tenant text, p_operation text, p_class text, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    -- Others act upon this commit (a broker is acked, an operator is told): it must survive a crash.
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT j.* INTO v_job FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF050', 'there is no such job', 'operation', 'check tenant, operation and class');
    ELSIF v_job.exec NOT IN ('poison', 'cancelled') THEN
        PERFORM fencepost._refuse('ZF020', 'the job is neither poison nor cancelled', 'state', 'only those can be queued again');
    ELSIF v_job.exec = 'cancelled' AND v_job.reason = 'transferred' THEN
        PERFORM fencepost._refuse('ZF060', 'the job was taken over by ' || v_job.detail, 'operation', 'retry it there, or let it be given back');
    ELSIF v_job.archived_at IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF020', 'the job is archived', 'state', 'submit the work anew, as another operation');
    ELSIF v_job.open_effects > 0 THEN
        PERFORM fencepost._refuse('ZF030', 'an effect of this job is pending or unknown', 'effect', 'reconcile it first');
    END IF;
    UPDATE fencepost.job AS j SET exec = 'queued', generation = j.generation + 1, attempts = 0, finishes = 0,
        run_at = clock_timestamp(), reason = 'requeued', detail = p_reason, changed_at = clock_timestamp()
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
    DELETE FROM fencepost.wait AS w WHERE w.tenant = p_tenant AND w.operation = p_operation AND w.class = p_class;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, tenant, operation, subject, verdict)
    VALUES (gen_random_uuid(), 'requeue', p_actor, p_reason, p_tenant, p_operation, p_class, 'queued');
END $$;


-- jobs/claim.sql
-- Reclaims what expired leases left behind. Locked rows are skipped; what changed meanwhile is looked at again.
-- Crash here: [J] a worker that died is found by its expired lease; an effect it left pending becomes unknown.
CREATE OR REPLACE FUNCTION fencepost._reap(p_classes text[], p_limit integer, p_marks jsonb DEFAULT NULL)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_class text;
    v_keys record;
    v_job fencepost.job;
    v_count integer := 0;
BEGIN
    FOR v_class IN SELECT DISTINCT u.class FROM unnest(p_classes) AS u (class) LOOP
        -- The agenda says where to look; a lease that was renewed is looked at again at its new end. Only a running job has a
        -- lease, and only one of the pointer's generation counts.
        WITH seen AS MATERIALIZED (
            SELECT a.ctid AS at, a.tenant, a.operation, a.generation, a.epoch, j.lease_until
            FROM fencepost.agenda AS a
            LEFT JOIN LATERAL (
                SELECT CASE WHEN k.generation = a.generation THEN k.lease_until END AS lease_until FROM fencepost.job AS k
                WHERE k.tenant = a.tenant AND k.operation = a.operation AND k.class = a.class OFFSET 0) AS j ON true
            WHERE a.class = v_class AND a.priority = 2147483647 AND a.due <= v_now
              AND a.due >= coalesce((p_marks -> 'priorities' -> v_class ->> '2147483647')::timestamptz, '-infinity')
            ORDER BY a.due LIMIT 1000 FOR UPDATE OF a SKIP LOCKED
        ), over AS (
            DELETE FROM fencepost.agenda AS a USING seen AS s
            WHERE a.ctid = s.at AND (s.lease_until <= v_now) IS NOT TRUE
        ), renewed AS (
            INSERT INTO fencepost.agenda (class, priority, due, tenant, operation, generation, epoch)
            SELECT v_class, 2147483647, greatest(s.lease_until, clock_timestamp()), s.tenant, s.operation, s.generation, s.epoch
            FROM seen AS s WHERE s.lease_until > v_now
        )
        SELECT array_agg(s.tenant) AS tenants, array_agg(s.operation) AS operations INTO v_keys
        FROM seen AS s WHERE s.lease_until <= v_now;
        FOR v_job IN
            SELECT j.* FROM (
                SELECT k.tenant, k.operation FROM unnest(v_keys.tenants, v_keys.operations) AS k (tenant, operation) ORDER BY 1, 2) AS u
            CROSS JOIN LATERAL (
                SELECT k.* FROM fencepost.job AS k
                WHERE k.tenant = u.tenant AND k.operation = u.operation AND k.class = v_class AND k.lease_until <= v_now
                FOR NO KEY UPDATE SKIP LOCKED) AS j
            LIMIT p_limit - v_count
        LOOP
            PERFORM fencepost._leave(v_job, 'lease_expired', '', interval '0');
            v_count := v_count + 1;
        END LOOP;
    END LOOP;
    RETURN v_count;
END $$;

-- Takes a running, locked job away from its attempt: unknown effects block it, a used-up budget poisons it, else it is
-- queued again. Advances the generation.
CREATE OR REPLACE FUNCTION fencepost._leave(p_job fencepost.job, p_reason text, p_detail text, p_delay interval)
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_class fencepost.job_class;
    v_exec text;
    v_reason text := p_reason;
    v_finish boolean;
BEGIN
    SELECT c.* INTO STRICT v_class FROM fencepost.job_class AS c WHERE c.class = p_job.class;
    PERFORM fencepost._forget(e.tenant, e.operation, e.effect_key, p_reason)
    FROM fencepost.effect AS e
    WHERE e.tenant = p_job.tenant AND e.operation = p_job.operation AND e.class = p_job.class AND e.state = 'pending';
    v_finish := v_class.policy = 'strict' AND p_job.applied_effects > 0;
    IF p_job.open_effects > 0 THEN
        v_exec := 'blocked';
        v_reason := 'effect_unknown';
    ELSIF v_finish AND p_job.finishes >= v_class.max_finishes THEN
        v_exec := 'poison';
        v_reason := 'finishes_exhausted';
    ELSIF NOT v_finish AND p_job.attempts >= v_class.max_attempts THEN
        v_exec := 'poison';
        v_reason := 'attempts_exhausted';
    ELSE
        v_exec := 'queued';
    END IF;
    UPDATE fencepost.job AS j SET exec = v_exec, generation = j.generation + 1, attempt = NULL, owner = NULL, lease_until = NULL,
        run_at = CASE v_exec WHEN 'queued' THEN clock_timestamp() + p_delay ELSE j.run_at END,
        reason = v_reason,
        detail = CASE WHEN v_reason = p_reason THEN p_detail ELSE left(concat_ws(': ', p_reason, nullif(p_detail, '')), 500) END,
        changed_at = clock_timestamp()
    WHERE j.tenant = p_job.tenant AND j.operation = p_job.operation AND j.class = p_job.class;
    RETURN v_exec;
END $$;

-- Locks up to so many due jobs of one class, the most urgent first, and skips what others hold, what this claim has
-- already, and work under another epoch than its tenant's. Fetches what it takes and not the backlog. The pointers need no
-- lock: who holds the job may use them.
CREATE OR REPLACE FUNCTION fencepost._take(
    p_class text, p_priorities integer[], p_marks timestamptz[], p_now timestamptz, p_floor bigint, p_limit integer, p_but tid[])
RETURNS TABLE (at tid, job tid) LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
    SELECT d.at, j.at FROM unnest(p_priorities, p_marks) AS l (priority, mark)
    CROSS JOIN LATERAL (
        SELECT a.ctid AS at, a.tenant, a.operation, a.priority, a.generation FROM fencepost.agenda AS a
        WHERE a.class = p_class AND a.priority = l.priority AND a.due >= l.mark AND a.due <= p_now AND a.ctid <> ALL (p_but)
          AND a.epoch = greatest(p_floor, (SELECT t.claimable FROM fencepost.tenant AS t WHERE t.tenant = a.tenant))
        ORDER BY a.due) AS d
    CROSS JOIN LATERAL (
        SELECT k.ctid AS at FROM fencepost.job AS k
        WHERE k.tenant = d.tenant AND k.operation = d.operation AND k.class = p_class
          AND k.exec = 'queued' AND k.generation = d.generation AND k.priority = d.priority AND k.run_at <= p_now
          AND k.open_effects = 0
        FOR NO KEY UPDATE SKIP LOCKED) AS j
    LIMIT p_limit;
END $$;

-- Claims due work under finite leases, each with a new attempt and the next generation; an attempt counts here, so a
-- crash counts. Work with a pending or unknown effect is never claimed.
-- Several classes share one order; a class takes no more than its part of it while the others have work. `p_marks` is a
-- hint from `marks`, or null. Nothing is taken of what is paused, nor more of a class than its limits leave room for.
-- Invariant: here and in what is called from here a job is reached from what points to it, by key in a sub-select of its
-- own or by the place of a row that is locked; there is no other plan. A plain join would let a plan that was made when the
-- tables were empty read all jobs until they are analysed.
-- Locks: gate, `paused`, then job rows that nobody else holds, the most urgent first; no others. Of a class with a limit or a
-- fair one its own row before them, unless somebody holds it. Expired leases are reaped first.
CREATE OR REPLACE FUNCTION fencepost.claim(p_owner text, p_classes text[], p_limit integer, p_marks jsonb DEFAULT NULL)
RETURNS TABLE (tenant text, operation text, class text, generation bigint, attempt uuid, owner text, epoch bigint, mode text,
               attempts integer, max_attempts integer, args bytea, source_event uuid, lease_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_floor bigint;
    v_class record;
    v_took record;
    -- What is taken: pointers, and the locked jobs.
    v_at tid[] := '{}';
    v_jobs tid[] := '{}';
    v_classes text[] := '{}';
    v_share integer;
    -- Of classes with a limit and fair ones: who was served last, by class, and which jobs are taken.
    v_turns jsonb := '{}';
    v_turn_classes text[] := '{}';
    v_tenants text[] := '{}';
    v_operations text[] := '{}';
    -- The attempts of one claim share 106 random bits, and are numbered: asking for random bits a hundred times costs as much
    -- as the updates.
    v_attempts text := left(gen_random_uuid()::text, 32);
BEGIN
    PERFORM fencepost._require_identity('owner', p_owner);
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'limit is not between 1 and 1000', 'limit', NULL);
    ELSIF p_classes IS NULL OR EXISTS (
        SELECT FROM unnest(p_classes) AS u (class)
        WHERE NOT EXISTS (SELECT FROM fencepost.job_class AS k WHERE k.class = u.class)) THEN
        PERFORM fencepost._refuse('ZF051', 'a class is not registered', 'class', 'register it before it is claimed');
    END IF;
    PERFORM fencepost._enter();
    IF EXISTS (SELECT FROM fencepost.lifecycle) THEN
        PERFORM fencepost._require_owner(p_classes, 'fencepost');
    END IF;
    LOCK TABLE fencepost.paused IN ROW SHARE MODE;
    p_classes := fencepost._enabled(p_classes);
    PERFORM fencepost._reap(p_classes, 100, p_marks);
    PERFORM fencepost._expire_effects(p_classes, 100);
    PERFORM fencepost._wake(p_classes, 100, p_marks);
    SELECT i.floor INTO STRICT v_floor FROM fencepost.installation AS i;
    v_now := clock_timestamp();
    -- First to each class its part of the common order, then what is left to whoever has more.
    FOR v_class IN
        WITH one AS MATERIALIZED (
            SELECT k.class, k.fair OR k.job_limit IS NOT NULL AS in_turn FROM fencepost.job_class AS k
            WHERE k.class = ANY (p_classes)
              AND NOT EXISTS (SELECT FROM fencepost.paused AS h WHERE h.scope = 'class' AND h.name = k.class)
              AND NOT EXISTS (SELECT FROM fencepost.paused AS h WHERE h.scope = 'queue' AND h.name = k.queue)),
        priority AS MATERIALIZED (SELECT o.class, l.priority, l.mark FROM one AS o, fencepost._priorities(o.class, p_marks) AS l),
        part AS MATERIALIZED (
            SELECT h.class, count(*) AS share FROM (
                SELECT l.class FROM priority AS l CROSS JOIN LATERAL (
                    SELECT a.due FROM fencepost.agenda AS a
                    WHERE a.class = l.class AND a.priority = l.priority AND a.due >= l.mark AND a.due <= v_now
                    ORDER BY a.due LIMIT p_limit) AS d
                WHERE (SELECT count(*) FROM one) > 1
                ORDER BY l.priority DESC, d.due LIMIT p_limit) AS h
            GROUP BY h.class)
        SELECT o.class, o.in_turn, s.step, CASE s.step WHEN 1 THEN p.share ELSE p_limit END AS share,
               ARRAY(SELECT l.priority FROM priority AS l WHERE l.class = o.class ORDER BY l.priority DESC) AS priorities,
               ARRAY(SELECT l.mark FROM priority AS l WHERE l.class = o.class ORDER BY l.priority DESC) AS marks
        FROM generate_series(1, 2) AS s (step) CROSS JOIN one AS o LEFT JOIN part AS p ON p.class = o.class
        WHERE s.step = 2 OR p.share IS NOT NULL ORDER BY s.step, o.class
    LOOP
        v_share := least(v_class.share, p_limit - cardinality(v_at));
        EXIT WHEN v_share = 0;
        IF v_class.in_turn THEN
            SELECT t.*, array_fill(v_class.class, ARRAY[cardinality(t.at)]) AS classes INTO v_took
            FROM fencepost._take_turn(v_class.class, v_class.priorities, v_class.marks, v_now, v_floor, v_share, v_at,
                ARRAY(SELECT u.tenant FROM unnest(v_tenants, v_turn_classes) AS u (tenant, class) WHERE u.class = v_class.class),
                v_turns -> v_class.class) AS t;
            v_turns := CASE WHEN v_took.served IS NULL THEN v_turns ELSE v_turns || jsonb_build_object(v_class.class, v_took.served) END;
            v_turn_classes := v_turn_classes || v_took.classes;
            v_tenants := v_tenants || v_took.tenants;
            v_operations := v_operations || v_took.operations;
        ELSE
            SELECT array_agg(t.at) AS at, array_agg(t.job) AS jobs, array_agg(v_class.class) AS classes INTO v_took
            FROM fencepost._take(v_class.class, v_class.priorities, v_class.marks, v_now, v_floor, v_share, v_at) AS t;
        END IF;
        v_at := v_at || v_took.at;
        v_jobs := v_jobs || v_took.jobs;
        v_classes := v_classes || v_took.classes;
    END LOOP;
    RETURN QUERY
    WITH claimed AS (
        UPDATE fencepost.job AS j SET
            exec = 'running',
            mode = CASE WHEN k.policy = 'strict' AND j.applied_effects > 0 THEN 'finish' ELSE 'execute' END,
            generation = j.generation + 1, attempt = (v_attempts || to_hex(4096 + c.n))::uuid, owner = p_owner,
            lease_until = clock_timestamp() + k.lease,
            attempts = j.attempts + CASE WHEN k.policy = 'strict' AND j.applied_effects > 0 THEN 0 ELSE 1 END,
            finishes = j.finishes + CASE WHEN k.policy = 'strict' AND j.applied_effects > 0 THEN 1 ELSE 0 END,
            reason = NULL, detail = '', changed_at = clock_timestamp()
        FROM unnest(v_at, v_jobs, v_classes) WITH ORDINALITY AS c (at, job, class, n)
        JOIN fencepost.job_class AS k ON k.class = c.class
        WHERE j.ctid = c.job AND j.exec = 'queued' AND j.open_effects = 0
          AND j.epoch = greatest(v_floor, (SELECT t.claimable FROM fencepost.tenant AS t WHERE t.tenant = j.tenant))
        RETURNING j.*, c.at, k.max_attempts AS class_max_attempts, k.lease
    ), recorded AS (
        INSERT INTO fencepost.attempt (tenant, attempt, operation, class, generation, owner, epoch, mode)
        SELECT d.tenant, d.attempt, d.operation, d.class, d.generation, d.owner, d.epoch, d.mode FROM claimed AS d
    ), used AS (
        DELETE FROM fencepost.agenda AS a USING claimed AS d WHERE a.ctid = d.at
    ), leased AS (
        INSERT INTO fencepost.agenda (class, priority, due, tenant, operation, generation, epoch)
        SELECT d.class, 2147483647, d.lease_until, d.tenant, d.operation, d.generation, d.epoch FROM claimed AS d
    )
    SELECT d.tenant, d.operation, d.class, d.generation, d.attempt, d.owner, d.epoch, d.mode, d.attempts, d.class_max_attempts,
           d.args, d.source_event, (extract(epoch FROM d.lease) * 1000)::bigint
    FROM claimed AS d ORDER BY d.priority DESC, d.run_at;
    IF v_turns <> '{}' THEN
        PERFORM fencepost._note_turn(t.class, t.served, t.tenants, t.operations) FROM (
            SELECT l.key AS class, l.value AS served,
                   ARRAY(SELECT u.tenant FROM unnest(v_tenants, v_turn_classes) AS u (tenant, class)
                         WHERE u.class = l.key) AS tenants,
                   ARRAY(SELECT u.operation FROM unnest(v_operations, v_turn_classes) AS u (operation, class)
                         WHERE u.class = l.key) AS operations
            FROM jsonb_each(v_turns) AS l) AS t;
    END IF;
END $$;

-- Extends the lease of the current attempt by the class's lease, counted from now; nobody else's. Waits half a second at
-- most for the job row (55P03): one long publish must not keep a worker from renewing its other leases.
CREATE OR REPLACE FUNCTION fencepost.renew(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' AS $$
BEGIN
    PERFORM fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    UPDATE fencepost.job AS j SET lease_until = greatest(j.lease_until, clock_timestamp() + c.lease)
    FROM fencepost.job_class AS c
    WHERE c.class = p_class AND j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
END $$;

-- Ends the current attempt without a result: queued again with a delay, blocked by an open effect, or poison.
-- Returns what the job became.
CREATE OR REPLACE FUNCTION fencepost.fail(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint,
    p_reason text, p_detail text, p_delay interval DEFAULT NULL, p_final boolean DEFAULT false)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
    v_class fencepost.job_class;
    v_delay interval := p_delay;
BEGIN
    v_job := fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    SELECT c.* INTO STRICT v_class FROM fencepost.job_class AS c WHERE c.class = p_class;
    IF v_delay IS NULL THEN
        -- Doubles with every attempt up to the cap, then spread over the upper half.
        v_delay := least(v_class.backoff_max, v_class.backoff_base * power(2, least(v_job.attempts - 1, 30)))
                   * (0.5 + random() / 2);
    END IF;
    IF p_final AND v_job.open_effects = 0 THEN
        UPDATE fencepost.job AS j SET exec = 'poison', generation = j.generation + 1, attempt = NULL, owner = NULL,
            lease_until = NULL, reason = p_reason, detail = left(coalesce(p_detail, ''), 500), changed_at = clock_timestamp()
        WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
        RETURN 'poison';
    END IF;
    RETURN fencepost._leave(v_job, p_reason, left(coalesce(p_detail, ''), 500), v_delay);
END $$;

-- Gives the claim back untouched, as a worker that stops does; the attempt is not charged.
CREATE OR REPLACE FUNCTION fencepost.release(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
BEGIN
    v_job := fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    IF v_job.open_effects = 0 THEN
        UPDATE fencepost.job AS j SET attempts = j.attempts - CASE j.mode WHEN 'execute' THEN 1 ELSE 0 END,
            finishes = j.finishes - CASE j.mode WHEN 'finish' THEN 1 ELSE 0 END
        WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class
        RETURNING j.* INTO v_job;
    END IF;
    RETURN fencepost._leave(v_job, 'worker_stopped', '', interval '0');
END $$;


-- jobs/complete_many.sql
-- Completes many jobs, each under its own fence, in one transaction: the jobs of those items whose fence is current are
-- done, the others are left as they are. Returns the refused items only: which one (from 1), the SQLSTATE that `complete`
-- would have raised for it, and the part of the fence or the field.
-- Invariant: jobs are reached by key in a sub-select of its own, then by the places of the locked rows, as in `claim`.
-- Locks: gate, then the job rows by tenant, operation and class; they are compared in a later statement than the one that waits.
CREATE OR REPLACE FUNCTION fencepost.complete_many(
    p_tenants text[], p_operations text[], p_classes text[], p_generations bigint[], p_attempts uuid[], p_owners text[],
    p_epochs bigint[])
RETURNS TABLE (item bigint, code text, field text) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_floor bigint;
    v_jobs tid[];
    v_done bigint[];
BEGIN
    IF cardinality(p_tenants) IS NULL OR cardinality(p_tenants) NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'not between 1 and 1000 items', 'items', 'complete them in several batches');
    ELSIF (cardinality(p_operations), cardinality(p_classes), cardinality(p_generations), cardinality(p_attempts),
           cardinality(p_owners), cardinality(p_epochs)) IS DISTINCT FROM
          (cardinality(p_tenants), cardinality(p_tenants), cardinality(p_tenants), cardinality(p_tenants),
           cardinality(p_tenants), cardinality(p_tenants)) THEN
        PERFORM fencepost._refuse('ZF003', 'the parts of the fences are not equally many', 'items', 'give every part of every fence');
    END IF;
    PERFORM fencepost._enter();
    SELECT array_agg(j.at ORDER BY u.item) INTO v_jobs FROM (
        SELECT k.tenant, k.operation, k.class, k.item
        FROM unnest(p_tenants, p_operations, p_classes) WITH ORDINALITY AS k (tenant, operation, class, item) ORDER BY 1, 2, 3) AS u
    LEFT JOIN LATERAL (
        SELECT k.ctid AS at FROM fencepost.job AS k
        WHERE k.tenant = u.tenant AND k.operation = u.operation AND k.class = u.class FOR NO KEY UPDATE) AS j ON true;
    SELECT i.floor INTO STRICT v_floor FROM fencepost.installation AS i;
    PERFORM set_config('synchronous_commit', 'on', true);
    WITH done AS (
        UPDATE fencepost.job AS j SET exec = 'done', done_attempt = u.attempt, attempt = NULL, owner = NULL, lease_until = NULL,
            reason = NULL, detail = '', changed_at = clock_timestamp()
        FROM unnest(v_jobs, p_generations, p_attempts, p_owners, p_epochs) WITH ORDINALITY
             AS u (at, generation, attempt, owner, epoch, item)
        WHERE j.ctid = u.at AND j.exec = 'running' AND j.generation = u.generation AND j.attempt = u.attempt AND j.owner = u.owner
          AND j.epoch = u.epoch
          AND u.epoch = greatest(v_floor, (SELECT t.epoch FROM fencepost.tenant AS t WHERE t.tenant = j.tenant))
          AND j.lease_until > clock_timestamp() AND j.open_effects = 0
        RETURNING u.item)
    SELECT array_agg(d.item) INTO v_done FROM done AS d;
    IF cardinality(v_done) = cardinality(p_tenants) THEN
        RETURN;
    END IF;
    RETURN QUERY
    SELECT r.item, CASE r.part WHEN 'effect' THEN 'ZF030' ELSE 'ZF020' END, r.part FROM (
        SELECT u.item, CASE
            WHEN j.tenant IS NULL THEN 'operation'
            WHEN j.exec IS DISTINCT FROM 'running' THEN 'state'
            WHEN j.generation IS DISTINCT FROM u.generation THEN 'generation'
            WHEN j.attempt IS DISTINCT FROM u.attempt THEN 'attempt'
            WHEN j.owner IS DISTINCT FROM u.owner THEN 'owner'
            WHEN j.epoch IS DISTINCT FROM u.epoch OR fencepost._epoch(u.tenant) IS DISTINCT FROM u.epoch THEN 'epoch'
            WHEN j.lease_until <= clock_timestamp() THEN 'lease'
            ELSE 'effect' END AS part
        FROM unnest(p_tenants, p_operations, p_classes, p_generations, p_attempts, p_owners, p_epochs) WITH ORDINALITY
             AS u (tenant, operation, class, generation, attempt, owner, epoch, item)
        LEFT JOIN LATERAL (
            SELECT k.tenant, k.exec, k.generation, k.attempt, k.owner, k.epoch, k.lease_until FROM fencepost.job AS k
            WHERE k.tenant = u.tenant AND k.operation = u.operation AND k.class = u.class OFFSET 0) AS j ON true
        WHERE u.item <> ALL (coalesce(v_done, '{}'))) AS r
    ORDER BY r.item;
END $$;


-- jobs/doorbell.sql
-- Marks that a worker sleeps for so long; worth nothing after a crash, so its commit waits for no disk. True when every job that becomes due by a commit from now on will ring or is visible
-- to the next look; false while a writer that may have read the mark before is still open: then look again soon.
-- Locks: workers change the mark one after the other, and only for the time of this call.
CREATE OR REPLACE FUNCTION fencepost.doze_jobs(p_for interval) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_until bigint := (extract(epoch FROM clock_timestamp() + p_for) * 1000000)::bigint;
BEGIN
    PERFORM fencepost._enter();
    IF p_for IS NULL OR p_for NOT BETWEEN interval '0' AND interval '10 minutes' THEN
        PERFORM fencepost._refuse('ZF003', 'the sleep is not between 0 and 10 minutes', 'for', NULL);
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM pg_advisory_xact_lock(1179665234, 2);
    -- Invariant: every doze changes the mark, so that a ring for an older one cannot take it away.
    PERFORM setval('fencepost.job_doorbell', greatest(coalesce(pg_sequence_last_value('fencepost.job_doorbell'), 0) + 1, v_until));
    -- Who makes a job due locks this table before it reads the mark, and until its end.
    RETURN NOT EXISTS (
        SELECT FROM pg_locks AS l
        WHERE l.locktype = 'relation' AND l.relation = 'fencepost.agenda'::regclass AND l.mode = 'RowExclusiveLock'
          AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database()) AND l.granted);
END $$;

-- Everybody who slept under this mark was rung: nobody rings again, unless somebody fell asleep since.
CREATE OR REPLACE FUNCTION fencepost.rung_jobs(p_mark bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM pg_advisory_xact_lock(1179665234, 2);
    IF pg_sequence_last_value('fencepost.job_doorbell') = p_mark THEN
        PERFORM setval('fencepost.job_doorbell', 0);
    END IF;
END $$;

-- Rings, if a worker sleeps, once for a transaction; whoever lets work become due that no job row tells of calls it.
CREATE OR REPLACE FUNCTION fencepost._ring_jobs() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_mark bigint := pg_sequence_last_value('fencepost.job_doorbell');
BEGIN
    IF v_mark > (extract(epoch FROM clock_timestamp()) * 1000000)::bigint THEN
        PERFORM pg_notify('fencepost_jobs', v_mark::text);
    END IF;
END $$;


-- jobs/fence.sql
-- Locks the job, then looks: refuses (ZF020, naming the first part that differs) unless the whole fence is current.
-- Locks: gate, then the job row; the clock is read in a later statement than the one that waits.
CREATE OR REPLACE FUNCTION fencepost._fence(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint)
RETURNS fencepost.job LANGUAGE plpgsql AS $$
DECLARE
    v_job fencepost.job;
    v_part text;
BEGIN
    PERFORM fencepost._enter();
    SELECT j.* INTO v_job FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF020', 'there is no such job', 'operation', 'stop; nothing may be published');
    END IF;
    v_part := CASE
        WHEN v_job.exec IS DISTINCT FROM 'running' THEN 'state'
        WHEN v_job.generation IS DISTINCT FROM p_generation THEN 'generation'
        WHEN v_job.attempt IS DISTINCT FROM p_attempt THEN 'attempt'
        WHEN v_job.owner IS DISTINCT FROM p_owner THEN 'owner'
        WHEN v_job.epoch IS DISTINCT FROM p_epoch OR fencepost._epoch(p_tenant) IS DISTINCT FROM p_epoch THEN 'epoch'
        WHEN v_job.lease_until <= clock_timestamp() THEN 'lease'
    END;
    IF v_part IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF020', 'the fence is no longer current: ' || v_part, v_part,
            'stop this attempt; what it computed may be staged for its successor, not published');
    END IF;
    RETURN v_job;
END $$;

-- Fences the caller's transaction: from here to its commit nobody supersedes this attempt, and the commit itself is
-- refused when the fence is no longer current by then. Take it outside savepoints, before any domain write.
CREATE OR REPLACE FUNCTION fencepost.fence(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
BEGIN
    v_job := fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    IF v_job.open_effects > 0 THEN
        PERFORM fencepost._refuse('ZF030', 'an effect of this job is pending or unknown', 'effect', 'record or reconcile it first');
    END IF;
    PERFORM set_config('synchronous_commit', 'on', true);
    INSERT INTO fencepost.publication (tenant, operation, class, generation, attempt, owner, epoch, lease_until)
    VALUES (p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch, v_job.lease_until);
END $$;

-- Checks the fence again and completes the job, in the transaction that holds the fence.
CREATE OR REPLACE FUNCTION fencepost.complete(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
BEGIN
    v_job := fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    IF v_job.open_effects > 0 THEN
        PERFORM fencepost._refuse('ZF030', 'an effect of this job is pending or unknown', 'effect', 'record or reconcile it first');
    END IF;
    PERFORM set_config('synchronous_commit', 'on', true);
    UPDATE fencepost.job AS j SET exec = 'done', done_attempt = p_attempt, attempt = NULL, owner = NULL, lease_until = NULL,
        reason = NULL, detail = '', changed_at = clock_timestamp()
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
END $$;

-- The check at commit, whatever the client did or forgot: still this attempt's, unexpired, same epoch, armed.
CREATE OR REPLACE FUNCTION fencepost._publication_guard()
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
    v_part text;
BEGIN
    PERFORM fencepost._enter();
    SELECT j.* INTO v_job FROM fencepost.job AS j
    WHERE j.tenant = NEW.tenant AND j.operation = NEW.operation AND j.class = NEW.class FOR NO KEY UPDATE;
    v_part := CASE
        WHEN NOT FOUND THEN 'operation'
        WHEN NOT (v_job.exec = 'running' AND v_job.attempt = NEW.attempt OR v_job.exec = 'done' AND v_job.done_attempt = NEW.attempt)
             THEN 'state'
        WHEN v_job.generation <> NEW.generation THEN 'generation'
        WHEN fencepost._epoch(NEW.tenant) <> NEW.epoch OR v_job.epoch <> NEW.epoch THEN 'epoch'
        WHEN v_job.open_effects > 0 THEN 'effect'
        WHEN greatest(NEW.lease_until, v_job.lease_until) <= clock_timestamp() THEN 'lease'
    END;
    IF v_part IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF020', 'the fence was lost before the commit: ' || v_part, v_part,
            'nothing was published; what was computed may be staged for the successor');
    END IF;
    RETURN NULL;
END $$;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'fencepost.publication'::regclass AND tgname = 'publication_guard') THEN
        CREATE CONSTRAINT TRIGGER publication_guard AFTER INSERT ON fencepost.publication
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fencepost._publication_guard();
    END IF;
END $$;


-- jobs/lifecycle.sql
-- Refuses (ZF060) unless this implementation owns the lifecycle of each of these classes. The gate is held: nobody is given a
-- class before whoever relies upon this has committed.
CREATE OR REPLACE FUNCTION fencepost._require_owner(p_classes text[], p_implementation text)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_class text;
    v_owner text;
BEGIN
    SELECT u.class, coalesce(l.implementation, 'fencepost') INTO v_class, v_owner
    FROM unnest(p_classes) AS u (class) LEFT JOIN fencepost.lifecycle AS l ON l.class = u.class
    WHERE coalesce(l.implementation, 'fencepost') IS DISTINCT FROM p_implementation ORDER BY u.class LIMIT 1;
    IF FOUND THEN
        PERFORM fencepost._refuse('ZF060', format('the class %s belongs to %s', v_class, v_owner), 'class',
            'stop claiming it; an authority admin may hand it over: fencepost jobs owner');
    END IF;
END $$;

-- For another implementation: from here to the end of the caller's transaction it owns the lifecycle of this class, or the
-- call is refused. Take it in every transaction that claims, retries, reaps or completes.
-- Locks: gate.
CREATE OR REPLACE FUNCTION fencepost.own(p_class text, p_implementation text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_identity('implementation', p_implementation);
    PERFORM fencepost._enter();
    PERFORM fencepost._require_owner(ARRAY[p_class], p_implementation);
END $$;

-- Gives the lifecycle of a class to another implementation, or back to fencepost; returns whose it was. Refused while its jobs
-- run or an effect of them is open; from another implementation, whose work nobody here can see, only with evidence that it
-- has stopped. Jobs that are queued or waiting stay where they are, and whoever owns the class may take them over.
-- Locks: gate EXCLUSIVE: waits at most five seconds for the claims and the `own` that are under way.
CREATE OR REPLACE FUNCTION fencepost.hand_over(
    p_class text, p_implementation text, p_version bigint, p_actor text, p_reason text, p_evidence text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_was text;
BEGIN
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_identity('implementation', p_implementation);
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._change(p_version);
    IF NOT EXISTS (SELECT FROM fencepost.job_class AS k WHERE k.class = p_class) THEN
        PERFORM fencepost._refuse('ZF051', 'this class is not registered', 'class', 'see: fencepost jobs queues');
    END IF;
    SELECT l.implementation INTO v_was FROM fencepost.lifecycle AS l WHERE l.class = p_class;
    v_was := coalesce(v_was, 'fencepost');
    IF v_was = p_implementation THEN
        RETURN v_was;
    ELSIF v_was <> 'fencepost' AND coalesce(p_evidence, '') = '' THEN
        PERFORM fencepost._refuse('ZF037', 'there is no evidence that ' || v_was || ' has stopped', 'evidence',
            'stop it, let it give back what it took over, and say where that can be seen');
    ELSIF EXISTS (SELECT FROM fencepost.agenda AS a
                  JOIN fencepost.job AS j ON j.tenant = a.tenant AND j.operation = a.operation AND j.class = a.class
                  WHERE a.class = p_class AND a.priority = 2147483647 AND j.exec = 'running') THEN
        PERFORM fencepost._refuse('ZF060', 'jobs of this class are running', 'running',
            'drain it first: fencepost jobs pause --class, then wait until they have ended');
    ELSIF EXISTS (SELECT FROM fencepost.effect AS e WHERE e.class = p_class AND e.state IN ('pending', 'unknown')) THEN
        PERFORM fencepost._refuse('ZF030', 'an effect of this class is pending or unknown', 'effect', 'reconcile it first');
    END IF;
    DELETE FROM fencepost.lifecycle AS l WHERE l.class = p_class;
    IF p_implementation <> 'fencepost' THEN
        INSERT INTO fencepost.lifecycle (class, implementation) VALUES (p_class, p_implementation);
    END IF;
    PERFORM fencepost._outdate();
    PERFORM fencepost._log_authority('handed_over', jsonb_build_object('class', p_class, 'from', v_was, 'to', p_implementation,
        'actor', p_actor, 'reason', p_reason, 'evidence', p_evidence));
    RETURN v_was;
END $$;

-- For the owner of a class that is not fencepost: takes up to so many queued jobs out of here, in the transaction that puts
-- them into its own store. From its commit on they are there and nowhere else. What has begun an effect, or may have, stays.
-- Locks: gate, then job rows that nobody else holds.
CREATE OR REPLACE FUNCTION fencepost.take_over(p_class text, p_implementation text, p_limit integer)
RETURNS TABLE (tenant text, operation text, args bytea, source_event uuid, priority integer, run_at timestamptz, attempts integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count bigint;
BEGIN
    IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'limit is not between 1 and 1000', 'limit', NULL);
    ELSIF p_implementation = 'fencepost' THEN
        PERFORM fencepost._refuse('ZF003', 'fencepost claims its jobs', 'implementation', NULL);
    END IF;
    PERFORM fencepost.own(p_class, p_implementation);
    PERFORM set_config('synchronous_commit', 'on', true);
    RETURN QUERY
    WITH found AS MATERIALIZED (
        SELECT j.tenant, j.operation, a.ctid AS pointer FROM fencepost.agenda AS a
        JOIN fencepost.job AS j ON j.tenant = a.tenant AND j.operation = a.operation AND j.class = a.class
        WHERE a.class = p_class AND a.priority < 2147483646
          AND j.exec = 'queued' AND j.generation = a.generation AND j.priority = a.priority AND j.epoch = a.epoch
          AND j.open_effects = 0 AND j.applied_effects = 0 AND NOT j.suspect
          AND NOT EXISTS (SELECT FROM fencepost.effect AS e WHERE e.tenant = j.tenant AND e.operation = j.operation AND e.class = j.class)
        ORDER BY a.priority DESC, a.due LIMIT p_limit FOR NO KEY UPDATE OF j SKIP LOCKED
    ), moved AS (
        UPDATE fencepost.job AS j SET exec = 'cancelled', generation = j.generation + 1, reason = 'transferred',
            detail = p_implementation, changed_at = clock_timestamp()
        FROM found AS f WHERE j.tenant = f.tenant AND j.operation = f.operation AND j.class = p_class
        RETURNING j.*, f.pointer
    ), used AS (
        DELETE FROM fencepost.agenda AS a USING moved AS m WHERE a.ctid = m.pointer
    )
    SELECT m.tenant, m.operation, m.args, m.source_event, m.priority, m.run_at, m.attempts FROM moved AS m;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF v_count > 0 THEN
        INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
        VALUES (gen_random_uuid(), 'take_over', p_implementation, 'it owns the class', p_class, v_count || ' transferred');
    END IF;
END $$;

-- For the owner of a class: gives jobs that it took over back, with the attempts that they have used by now, in the transaction
-- that removes them from its own store. All of them or none: one that is not its own is refused (ZF060).
-- Locks: gate, then the jobs in the order of their keys.
CREATE OR REPLACE FUNCTION fencepost.give_back(
    p_class text, p_implementation text, p_tenants text[], p_operations text[], p_attempts integer[])
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count constant integer := cardinality(p_tenants);
    v_theirs bigint;
BEGIN
    IF v_count IS NULL OR v_count NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'not between 1 and 1000 jobs', 'jobs', 'give them back in several batches');
    ELSIF (cardinality(p_operations), cardinality(p_attempts)) IS DISTINCT FROM (v_count, v_count) THEN
        PERFORM fencepost._refuse('ZF003', 'the parts of the jobs are not equally many', 'jobs', 'give every part of every job');
    END IF;
    PERFORM fencepost.own(p_class, p_implementation);
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM FROM fencepost.job AS j
    WHERE j.class = p_class
      AND (j.tenant, j.operation) IN (SELECT u.tenant, u.operation FROM unnest(p_tenants, p_operations) AS u (tenant, operation))
    ORDER BY j.tenant, j.operation FOR NO KEY UPDATE;
    UPDATE fencepost.job AS j SET exec = 'queued', generation = j.generation + 1, attempts = greatest(j.attempts, u.attempts),
        run_at = greatest(j.run_at, clock_timestamp()), reason = 'given_back', detail = p_implementation, changed_at = clock_timestamp()
    FROM unnest(p_tenants, p_operations, p_attempts) AS u (tenant, operation, attempts)
    WHERE j.tenant = u.tenant AND j.operation = u.operation AND j.class = p_class
      AND j.exec = 'cancelled' AND j.reason = 'transferred' AND j.detail = p_implementation;
    GET DIAGNOSTICS v_theirs = ROW_COUNT;
    IF v_theirs <> v_count THEN
        PERFORM fencepost._refuse('ZF060', 'a job is not with this implementation, or is named twice', 'operation',
            'give back what was taken over, each job once');
    END IF;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
    VALUES (gen_random_uuid(), 'give_back', p_implementation, 'it owns the class', p_class, v_count || ' given back');
END $$;


-- jobs/manifest.sql
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


-- jobs/note_job.sql
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


-- jobs/progress.sql
-- Notes how far the current attempt is; nobody else's. Waits half a second at most for the job row (55P03).
-- Locks: gate, then the job row.
CREATE OR REPLACE FUNCTION fencepost.report_progress(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint,
    p_fraction double precision, p_note text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' AS $$
BEGIN
    IF p_fraction IS NULL OR p_fraction NOT BETWEEN 0 AND 1 THEN
        PERFORM fencepost._refuse('ZF003', 'fraction is not between 0 and 1', 'fraction', NULL);
    ELSIF p_note IS NULL OR length(p_note) > 200 THEN
        PERFORM fencepost._refuse('ZF003', 'note is null or longer than 200 characters', 'note', NULL);
    END IF;
    PERFORM fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    INSERT INTO fencepost.progress AS p (tenant, operation, class, attempt, fraction, note)
    VALUES (p_tenant, p_operation, p_class, p_attempt, p_fraction, p_note)
    ON CONFLICT (tenant, operation, class) DO UPDATE
    SET attempt = p_attempt, fraction = p_fraction, note = p_note, at = clock_timestamp();
END $$;

-- What was noted last, and whether the attempt that noted it is the current one still.
CREATE OR REPLACE FUNCTION fencepost.progress(p_tenant text, p_operation text, p_class text)
RETURNS TABLE (fraction double precision, note text, attempt uuid, at timestamptz, current boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT p.fraction, p.note, p.attempt, p.at, coalesce(j.attempt = p.attempt, false) FROM fencepost.progress AS p
    JOIN fencepost.job AS j ON j.tenant = p.tenant AND j.operation = p.operation AND j.class = p.class
    WHERE p.tenant = p_tenant AND p.operation = p_operation AND p.class = p_class
$$;


-- jobs/protect.sql
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


-- jobs/published.sql
-- Reads back what an ambiguous COMMIT did: true when this attempt completed the job. Waits at most five seconds for the
-- job row, because a transaction that may still commit holds it: false is then definite, a lock timeout is not an answer.
-- Locks: the job row.
CREATE OR REPLACE FUNCTION fencepost.published(p_tenant text, p_operation text, p_class text, p_attempt uuid)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_done_attempt uuid;
BEGIN
    SELECT j.done_attempt INTO v_done_attempt FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class FOR NO KEY UPDATE;
    RETURN coalesce(v_done_attempt = p_attempt, false);
END $$;

-- Reads back an ambiguous begin: the version the effect has under this effect attempt, or null when it was not begun.
-- Locks: the job row, for the same reason.
CREATE OR REPLACE FUNCTION fencepost.begun(
    p_tenant text, p_operation text, p_class text, p_effect_key text, p_effect_attempt uuid)
RETURNS integer LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_version integer;
BEGIN
    PERFORM FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class FOR NO KEY UPDATE;
    SELECT e.version INTO v_version FROM fencepost.effect AS e
    WHERE e.tenant = p_tenant AND e.operation = p_operation AND e.effect_key = p_effect_key
      AND e.effect_attempt = p_effect_attempt AND e.state = 'pending';
    RETURN v_version;
END $$;


-- jobs/queues.sql
-- Stops a queue, or a class, from being claimed; what runs goes on, and may renew, publish and end as ever.
-- Returns paused, or already_paused (by whom and why stays as it is).
-- Locks: waits for the claims that are under way, so that after its commit nothing more starts.
CREATE OR REPLACE FUNCTION fencepost.pause(p_scope text, p_name text, p_actor text, p_reason text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_scope(p_scope, p_name, p_actor, p_reason);
    IF p_scope = 'class' AND NOT EXISTS (SELECT FROM fencepost.job_class AS k WHERE k.class = p_name) THEN
        PERFORM fencepost._refuse('ZF051', 'this class is not registered', 'class', 'see: fencepost jobs queues');
    ELSIF p_scope = 'queue' AND NOT EXISTS (SELECT FROM fencepost.job_class AS k WHERE k.queue = p_name) THEN
        PERFORM fencepost._refuse('ZF003', 'no registered class is in this queue', 'queue', 'see: fencepost jobs queues');
    END IF;
    PERFORM set_config('synchronous_commit', 'on', true);
    LOCK TABLE fencepost.paused IN EXCLUSIVE MODE;
    INSERT INTO fencepost.paused (scope, name, actor, reason) VALUES (p_scope, p_name, p_actor, p_reason)
    ON CONFLICT (scope, name) DO NOTHING;
    IF NOT FOUND THEN
        RETURN 'already_paused';
    END IF;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
    VALUES (gen_random_uuid(), 'pause', p_actor, p_reason, p_scope || ' ' || p_name, 'paused');
    RETURN 'paused';
END $$;

-- Lets a paused queue or class be claimed again. Returns resumed, or not_paused.
CREATE OR REPLACE FUNCTION fencepost.resume(p_scope text, p_name text, p_actor text, p_reason text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._require_scope(p_scope, p_name, p_actor, p_reason);
    PERFORM set_config('synchronous_commit', 'on', true);
    DELETE FROM fencepost.paused AS h WHERE h.scope = p_scope AND h.name = p_name;
    IF NOT FOUND THEN
        RETURN 'not_paused';
    END IF;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
    VALUES (gen_random_uuid(), 'resume', p_actor, p_reason, p_scope || ' ' || p_name, 'resumed');
    RETURN 'resumed';
END $$;

-- Refuses what names neither a queue nor a class, or not who decides and why.
CREATE OR REPLACE FUNCTION fencepost._require_scope(p_scope text, p_name text, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM fencepost._require_login();
    IF p_scope IS NULL OR p_scope NOT IN ('queue', 'class') THEN
        PERFORM fencepost._refuse('ZF003', 'scope is neither queue nor class', 'scope', NULL);
    END IF;
    PERFORM fencepost._require_identity(p_scope, p_name);
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
END $$;

-- Each class with its queue and limits, how many run (where there is a limit), how many tenants are at theirs, and what
-- keeps it from being claimed: open, paused (its queue or itself), at_limit.
CREATE OR REPLACE VIEW fencepost.queues AS
    SELECT k.queue, k.class, k.job_limit, k.tenant_limit, k.fair, CASE WHEN k.job_limit IS NOT NULL THEN r.running END AS running,
           CASE WHEN k.tenant_limit IS NOT NULL THEN r.tenants_at_limit END AS tenants_at_limit,
           CASE WHEN h.scope IS NOT NULL THEN 'paused' WHEN r.running >= k.job_limit THEN 'at_limit' ELSE 'open' END AS state,
           h.scope AS paused, h.actor, h.reason, h.paused_at
    FROM fencepost.job_class AS k
    LEFT JOIN LATERAL (
        SELECT p.* FROM fencepost.paused AS p WHERE (p.scope, p.name) IN (('class', k.class), ('queue', k.queue))
        ORDER BY p.scope DESC LIMIT 1) AS h ON true
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(t.running), 0)::bigint AS running,
               count(*) FILTER (WHERE t.running >= k.tenant_limit) AS tenants_at_limit
        FROM (
            SELECT j.tenant, count(*) AS running
            FROM (SELECT u.* FROM fencepost.turn AS u WHERE u.class = k.class ORDER BY u.n DESC LIMIT 1) AS u
            CROSS JOIN LATERAL unnest(u.tenants, u.operations, u.generations) AS o (tenant, operation, generation)
            JOIN fencepost.job AS j ON j.tenant = o.tenant AND j.operation = o.operation AND j.class = k.class
            WHERE j.exec = 'running' AND j.generation = o.generation
            GROUP BY j.tenant) AS t) AS r;


-- jobs/register_class.sql
-- Registers a class of jobs or changes its policy; the handler's process calls it before it claims. A limit of each tenant
-- makes the class fair, and where the class has no limit of its own, that is 1,000.
-- Locks: the class; where it becomes limited then every claim, for what they took before has to be counted.
CREATE OR REPLACE FUNCTION fencepost.register_class(
    p_class text, p_policy text, p_lease interval, p_max_attempts integer, p_max_finishes integer,
    p_backoff_base interval, p_backoff_max interval, p_max_effect_timeout interval, p_network_bound interval,
    p_queue text DEFAULT 'default', p_limit integer DEFAULT NULL, p_tenant_limit integer DEFAULT NULL, p_fair boolean DEFAULT false)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    v_limit integer := coalesce(p_limit, CASE WHEN p_tenant_limit IS NOT NULL THEN 1000 END);
    v_fair boolean := p_fair OR p_tenant_limit IS NOT NULL;
    v_was fencepost.job_class;
BEGIN
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_identity('queue', p_queue);
    IF p_policy IS NULL OR p_policy NOT IN ('strict', 'resumable') THEN
        PERFORM fencepost._refuse('ZF003', 'policy is neither strict nor resumable', 'policy', NULL);
    ELSIF p_lease IS NULL OR p_lease NOT BETWEEN interval '0.1 second' AND interval '1 day' THEN
        PERFORM fencepost._refuse('ZF003', 'lease is not between 0.1 seconds and a day', 'lease', NULL);
    ELSIF p_max_attempts IS NULL OR p_max_attempts NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'max_attempts is not between 1 and 1000', 'max_attempts', NULL);
    ELSIF p_max_effect_timeout IS NULL OR p_max_effect_timeout NOT BETWEEN interval '0.05 second' AND interval '1 day' THEN
        PERFORM fencepost._refuse('ZF003', 'max_effect_timeout is not between 0.05 seconds and a day', 'max_effect_timeout', NULL);
    ELSIF p_max_finishes IS NULL OR p_max_finishes NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'max_finishes is not between 1 and 1000', 'max_finishes', NULL);
    ELSIF p_backoff_base IS NULL OR p_backoff_max IS NULL OR p_backoff_base < interval '0' OR p_backoff_max < p_backoff_base
          OR p_backoff_max > interval '30 days' THEN
        PERFORM fencepost._refuse('ZF003', 'backoff is not 0 <= base <= max <= 30 days', 'backoff', NULL);
    ELSIF p_network_bound IS NULL OR p_network_bound NOT BETWEEN interval '0' AND interval '1 day' THEN
        PERFORM fencepost._refuse('ZF003', 'network_bound is not between 0 and a day', 'network_bound', NULL);
    ELSIF p_limit NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'limit is not between 1 and 1000', 'limit', 'leave it out for a class without one');
    ELSIF p_tenant_limit NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'tenant_limit is not between 1 and 1000', 'tenant_limit',
            'leave it out for a class without one');
    ELSIF p_fair IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'fair is neither true nor false', 'fair', NULL);
    END IF;
    SELECT c.* INTO v_was FROM fencepost.job_class AS c WHERE c.class = p_class FOR NO KEY UPDATE;
    INSERT INTO fencepost.job_class AS c (class, policy, lease, max_attempts, max_finishes, backoff_base, backoff_max,
        max_effect_timeout, network_bound, queue, job_limit, tenant_limit, fair)
    VALUES (p_class, p_policy, p_lease, p_max_attempts, p_max_finishes, p_backoff_base, p_backoff_max,
        p_max_effect_timeout, p_network_bound, p_queue, v_limit, p_tenant_limit, v_fair)
    ON CONFLICT (class) DO UPDATE SET policy = p_policy, lease = p_lease, max_attempts = p_max_attempts,
        max_finishes = p_max_finishes, backoff_base = p_backoff_base, backoff_max = p_backoff_max,
        max_effect_timeout = p_max_effect_timeout, network_bound = p_network_bound,
        queue = p_queue, job_limit = v_limit, tenant_limit = p_tenant_limit, fair = v_fair, registered_at = clock_timestamp()
    WHERE (c.policy, c.lease, c.max_attempts, c.max_finishes, c.backoff_base, c.backoff_max, c.max_effect_timeout, c.network_bound)
       IS DISTINCT FROM (p_policy, p_lease, p_max_attempts, p_max_finishes, p_backoff_base, p_backoff_max, p_max_effect_timeout, p_network_bound)
       OR (c.queue, c.job_limit, c.tenant_limit, c.fair) IS DISTINCT FROM (p_queue, v_limit, p_tenant_limit, v_fair);
    IF v_limit IS NOT NULL AND v_was.job_limit IS NULL THEN
        LOCK TABLE fencepost.paused IN EXCLUSIVE MODE;
        -- Invariant: whatever runs has a pointer to the end of its lease.
        PERFORM fencepost._note_turn(p_class, NULL, array_agg(a.tenant), array_agg(a.operation))
        FROM fencepost.agenda AS a WHERE a.class = p_class AND a.priority = 2147483647;
    END IF;
    IF v_fair AND v_was.fair IS NOT TRUE THEN
        -- The rest, and what is being submitted now, is marked by claims and `marks` as it comes up.
        UPDATE fencepost.agenda AS x SET fair_class = p_class WHERE x.ctid = ANY (ARRAY(
            SELECT a.ctid FROM fencepost.agenda AS a
            WHERE a.class = p_class AND a.priority < 2147483646 AND a.fair_class IS NULL LIMIT 100000 FOR UPDATE SKIP LOCKED));
    END IF;
END $$;


-- jobs/result.sql
-- As `complete`, and keeps what the attempt returned, in the same commit.
CREATE OR REPLACE FUNCTION fencepost.complete_with(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint, p_result bytea)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_result IS NULL OR octet_length(p_result) > 65536 THEN
        PERFORM fencepost._refuse('ZF003', 'result is null or larger than 64 KiB', 'result', 'store it elsewhere and return a reference');
    END IF;
    PERFORM fencepost.complete(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    INSERT INTO fencepost.result (tenant, operation, class, attempt, result)
    VALUES (p_tenant, p_operation, p_class, p_attempt, p_result);
END $$;

-- What the attempt that completed this job returned; nothing while it is not done, or where it returned nothing, or where
-- that has left the archive too.
CREATE OR REPLACE FUNCTION fencepost.result(p_tenant text, p_operation text, p_class text)
RETURNS TABLE (result bytea, attempt uuid, at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY
    SELECT r.result, r.attempt, r.at FROM fencepost.result AS r
    WHERE r.tenant = p_tenant AND r.operation = p_operation AND r.class = p_class;
    IF NOT FOUND AND EXISTS (SELECT FROM fencepost.job AS j
                             WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class
                               AND j.archived_at IS NOT NULL) THEN
        RETURN QUERY
        SELECT r.result, r.attempt, r.at FROM fencepost.archive AS a
        CROSS JOIN LATERAL jsonb_populate_record(NULL::fencepost.result, a.content) AS r
        WHERE a.tenant = p_tenant AND a.operation = p_operation AND a.class = p_class AND a.kind = 'result';
    END IF;
END $$;


-- jobs/schedules.sql
-- Registers a schedule of this worker's code and says under which version, or null: another definition is current and
-- its workers live, or an operator removed it. A starting worker's definition always becomes current; one that runs takes
-- over once nobody of the current version was seen for two minutes.
-- A changed definition goes on where the old one was: from the first instant that is overdue, else from now.
-- Locks: the schedule's row.
CREATE OR REPLACE FUNCTION fencepost.register_schedule(
    p_schedule text, p_class text, p_tenant text, p_timetable text, p_missed text, p_worker text, p_starting boolean)
RETURNS integer LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_was fencepost.schedule;
    v_now timestamptz;
BEGIN
    PERFORM fencepost._require_identity('schedule', p_schedule);
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_identity('tenant', p_tenant);
    PERFORM fencepost._require_identity('timetable', p_timetable);
    PERFORM fencepost._require_identity('owner', p_worker);
    IF p_missed IS NULL OR p_missed NOT IN ('skip', 'last', 'all') THEN
        PERFORM fencepost._refuse('ZF003', 'missed is not skip, last or all', 'missed', NULL);
    END IF;
    IF p_starting THEN
        v_now := clock_timestamp();
        INSERT INTO fencepost.schedule (schedule, class, tenant, timetable, missed, era, position, seen_at, seen_by)
        SELECT p_schedule, p_class, p_tenant, p_timetable, p_missed, i.era, v_now, v_now, p_worker FROM fencepost.installation AS i
        ON CONFLICT (schedule) DO NOTHING;
    END IF;
    SELECT s.* INTO v_was FROM fencepost.schedule AS s WHERE s.schedule = p_schedule FOR NO KEY UPDATE;
    v_now := clock_timestamp();
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF (v_was.class, v_was.tenant, v_was.timetable, v_was.missed) = (p_class, p_tenant, p_timetable, p_missed) THEN
        UPDATE fencepost.schedule AS s SET seen_at = v_now, seen_by = p_worker WHERE s.schedule = p_schedule;
        RETURN v_was.version;
    ELSIF NOT p_starting AND v_was.seen_at > v_now - interval '2 minutes' THEN
        RETURN NULL;
    END IF;
    UPDATE fencepost.schedule AS s SET class = p_class, tenant = p_tenant, timetable = p_timetable, missed = p_missed,
        version = s.version + 1, position = least(v_now, coalesce(s.next_at - interval '1 microsecond', s.position)), next_at = NULL,
        seen_at = v_now, seen_by = p_worker, registered_at = v_now
    WHERE s.schedule = p_schedule;
    RETURN v_was.version + 1;
END $$;

-- Takes one schedule that is due, among those of these versions, and says up to where it was submitted and what time it is.
-- Whoever took it has it until the end of the transaction, in which it submits and advances; others pass it by.
-- In a new era it starts anew: what was submitted before the restore is not known, and doing it twice is worse than late.
-- Locks: gate, then one schedule's row, skipping what others hold.
CREATE OR REPLACE FUNCTION fencepost.take_schedule(p_schedules text[], p_versions integer[], p_worker text)
RETURNS TABLE (schedule text, "position" timestamptz, now timestamptz, restored boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_due fencepost.schedule;
    v_era integer;
    v_now timestamptz;
BEGIN
    PERFORM fencepost._require_identity('owner', p_worker);
    PERFORM fencepost._enter();
    SELECT s.* INTO v_due FROM fencepost.schedule AS s
    JOIN unnest(p_schedules, p_versions) AS u (schedule, version) ON s.schedule = u.schedule AND s.version = u.version
    WHERE s.next_at IS NULL OR s.next_at <= (SELECT clock_timestamp())
    ORDER BY s.next_at NULLS FIRST, s.schedule LIMIT 1 FOR NO KEY UPDATE OF s SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT i.era INTO STRICT v_era FROM fencepost.installation AS i;
    v_now := clock_timestamp();
    UPDATE fencepost.schedule AS s SET seen_at = v_now, seen_by = p_worker, era = v_era,
        position = CASE s.era WHEN v_era THEN s.position ELSE v_now END, next_at = CASE s.era WHEN v_era THEN s.next_at END
    WHERE s.schedule = v_due.schedule;
    RETURN QUERY SELECT v_due.schedule, CASE v_due.era WHEN v_era THEN v_due.position ELSE v_now END, v_now, v_due.era <> v_era;
END $$;

-- Moves a schedule on, in the transaction that took it and submitted what was due. The position never goes back.
CREATE OR REPLACE FUNCTION fencepost.advance_schedule(
    p_schedule text, p_position timestamptz, p_next_at timestamptz, p_last_at timestamptz, p_submitted integer, p_missed integer)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE fencepost.schedule AS s SET position = p_position, next_at = p_next_at, last_at = coalesce(p_last_at, s.last_at),
        submitted = s.submitted + p_submitted, missed_count = s.missed_count + p_missed
    WHERE s.schedule = p_schedule AND s.position <= p_position;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such schedule, or it is further on', 'position', 'take it first');
    END IF;
END $$;

-- Says that workers of these versions are there, at most three times a minute for each schedule.
CREATE OR REPLACE FUNCTION fencepost.see_schedules(p_schedules text[], p_versions integer[], p_worker text)
RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE fencepost.schedule AS s SET seen_at = clock_timestamp(), seen_by = p_worker
    WHERE s.schedule = ANY (ARRAY(
        SELECT o.schedule FROM fencepost.schedule AS o
        JOIN unnest(p_schedules, p_versions) AS u (schedule, version) ON o.schedule = u.schedule AND o.version = u.version
        WHERE o.seen_at < clock_timestamp() - interval '20 seconds' ORDER BY o.schedule FOR NO KEY UPDATE OF o SKIP LOCKED))
$$;

-- Forgets a schedule that no worker's code has any more; its jobs stay. Refused while a worker of it is seen.
CREATE OR REPLACE FUNCTION fencepost.remove_schedule(p_schedule text, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_was fencepost.schedule;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._require_login();
    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT s.* INTO v_was FROM fencepost.schedule AS s WHERE s.schedule = p_schedule FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such schedule', 'schedule', 'see: fencepost jobs schedules list');
    ELSIF v_was.seen_at > clock_timestamp() - interval '1 minute' THEN
        PERFORM fencepost._refuse('ZF003', 'a worker with this schedule was seen within the last minute', 'seen_at',
            'take it out of the code and stop those workers first');
    END IF;
    DELETE FROM fencepost.schedule AS s WHERE s.schedule = p_schedule;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, tenant, subject, verdict)
    VALUES (gen_random_uuid(), 'remove_schedule', p_actor, p_reason, v_was.tenant, p_schedule, 'removed');
END $$;


-- jobs/signal.sql
-- Tells a job something, in the caller's transaction: inserts only, without gate and without a lock of the job, so it can run
-- inside any transaction. Returns `recorded`; `known` when this key has told the same before, of which only the key is looked
-- at first; `too_late` when the job is done, and nothing is kept. Another name or payload under the key is a conflict (ZF010).
-- Of an archived job nothing of that is looked at any more: it is always too late.
-- Locks: two calls with one key wait for each other.
CREATE OR REPLACE FUNCTION fencepost.signal(
    p_tenant text, p_operation text, p_class text, p_name text, p_payload bytea, p_key text DEFAULT NULL, p_actor text DEFAULT NULL)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_exec text;
    v_same boolean;
BEGIN
    PERFORM fencepost._require_identity('tenant', p_tenant);
    PERFORM fencepost._require_identity('operation', p_operation);
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_identity('name', p_name);
    IF p_key IS NOT NULL THEN
        PERFORM fencepost._require_identity('key', p_key);
    END IF;
    IF p_actor IS NOT NULL THEN
        PERFORM fencepost._require_identity('actor', p_actor);
    END IF;
    IF p_payload IS NULL OR octet_length(p_payload) > 65536 THEN
        PERFORM fencepost._refuse('ZF003', 'payload is null or larger than 64 KiB', 'payload', 'store it elsewhere and send a reference');
    END IF;
    PERFORM fencepost._require_login();
    SELECT CASE WHEN j.archived_at IS NULL THEN j.exec ELSE 'done' END INTO v_exec FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF050', 'there is no such job', 'operation', 'submit it first, in this transaction or before it');
    END IF;
    IF v_exec <> 'done' THEN
        IF (SELECT count(*) FROM (SELECT FROM fencepost.signal AS s
                                  WHERE s.tenant = p_tenant AND s.operation = p_operation AND s.class = p_class LIMIT 1000) AS c) = 1000 THEN
            PERFORM fencepost._refuse('ZF003', 'the job has been told a thousand times', 'name', 'count elsewhere and signal once');
        END IF;
        INSERT INTO fencepost.signal (tenant, operation, class, name, key, payload, actor)
        VALUES (p_tenant, p_operation, p_class, p_name, p_key, p_payload, p_actor) ON CONFLICT DO NOTHING;
        IF FOUND THEN
            -- Invariant: whatever the job is at this moment, a claim looks at it after this commit; see _wait_pointers.
            INSERT INTO fencepost.agenda (class, priority, due, tenant, operation, generation, epoch)
            VALUES (p_class, 2147483646, clock_timestamp(), p_tenant, p_operation, 0, 0);
            PERFORM fencepost._ring_jobs();
            RETURN 'recorded';
        END IF;
    END IF;
    SELECT s.name = p_name AND s.payload = p_payload INTO v_same FROM fencepost.signal AS s
    WHERE s.tenant = p_tenant AND s.operation = p_operation AND s.class = p_class AND s.key = p_key;
    IF v_same THEN
        RETURN 'known';
    ELSIF NOT v_same THEN
        PERFORM fencepost._refuse('ZF010', 'this key has told the job something else', 'key', 'a new signal needs a new key');
    ELSIF v_exec <> 'done' THEN
        RAISE serialization_failure USING MESSAGE = 'the signal was recorded after this snapshot', HINT = 'retry the transaction';
    END IF;
    RETURN 'too_late';
END $$;

-- Everything that a job was told, in the order in which it was written.
CREATE OR REPLACE FUNCTION fencepost.signals(p_tenant text, p_operation text, p_class text)
RETURNS TABLE (n bigint, name text, key text, payload bytea, actor text, login text, at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.n, s.name, s.key, s.payload, s.actor, s.login, s.at FROM fencepost.signal AS s
    WHERE s.tenant = p_tenant AND s.operation = p_operation AND s.class = p_class ORDER BY s.n
$$;


-- jobs/stage.sql
-- Stores what an attempt computed, for its successor; needs no lease and gives no right to publish. Immutable: the
-- first candidate of an attempt stays; true when this call stored it.
CREATE OR REPLACE FUNCTION fencepost.stage(p_tenant text, p_operation text, p_class text, p_attempt uuid, p_result bytea)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF p_result IS NULL OR octet_length(p_result) > 1048576 THEN
        PERFORM fencepost._refuse('ZF003', 'result is null or larger than 1 MiB', 'result', 'store it elsewhere and stage a reference');
    END IF;
    -- Held, so that it does not leave for the archive meanwhile.
    PERFORM FROM fencepost.attempt AS a
    WHERE a.tenant = p_tenant AND a.attempt = p_attempt AND a.operation = p_operation AND a.class = p_class FOR KEY SHARE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF020', 'this attempt never held the job, or the job is archived', 'attempt',
            'stage with the fence of the claim');
    END IF;
    -- Others act upon this commit (a broker is acked, an operator is told): it must survive a crash.
    PERFORM set_config('synchronous_commit', 'on', true);
    INSERT INTO fencepost.staged (tenant, operation, class, attempt, result)
    VALUES (p_tenant, p_operation, p_class, p_attempt, p_result)
    ON CONFLICT (tenant, operation, class, attempt) DO NOTHING;
    RETURN FOUND;
END $$;

-- The newest candidate that any attempt staged for this job, or nothing.
CREATE OR REPLACE FUNCTION fencepost.staged(p_tenant text, p_operation text, p_class text)
RETURNS TABLE (attempt uuid, result bytea, staged_at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT s.attempt, s.result, s.staged_at FROM fencepost.staged AS s
    WHERE s.tenant = p_tenant AND s.operation = p_operation AND s.class = p_class ORDER BY s.n DESC LIMIT 1
$$;


-- jobs/submit.sql
-- Schedules work for an operation in the caller's transaction. The same operation and class again is the same job;
-- with another meaning it is a conflict (ZF010). Takes no gate: accepted work waits for authority, it needs none.
CREATE OR REPLACE FUNCTION fencepost.submit(
    p_tenant text, p_operation text, p_class text, p_args bytea, p_binding text, p_source_event uuid DEFAULT NULL,
    p_run_at timestamptz DEFAULT NULL, p_priority integer DEFAULT 0)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_epoch bigint;
    v_meaning bytea;
    v_stored bytea;
    v_suspect timestamptz;
BEGIN
    PERFORM fencepost._require_identity('tenant', p_tenant);
    PERFORM fencepost._require_identity('operation', p_operation);
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_binding(p_binding);
    IF p_args IS NULL OR octet_length(p_args) > 1048576 THEN
        PERFORM fencepost._refuse('ZF003', 'args are null or larger than 1 MiB', 'args', 'store them elsewhere and pass a reference');
    ELSIF p_run_at NOT BETWEEN '2000-01-01 00:00+00' AND clock_timestamp() + interval '10 years' THEN
        PERFORM fencepost._refuse('ZF003', 'run_at is not within the next ten years', 'run_at', 'give an instant with a time zone');
    ELSIF p_priority NOT BETWEEN -1000000 AND 1000000 THEN
        -- What lies beyond is the agenda's own.
        PERFORM fencepost._refuse('ZF003', 'priority is not within a million', 'priority',
            'give a whole number from -1000000 to 1000000');
    END IF;
    v_epoch := fencepost._epoch(p_tenant);
    v_suspect := fencepost._suspect(p_tenant, p_operation, p_class, p_source_event);
    v_meaning := fencepost.meaning(p_tenant, p_operation, 'job:' || p_class, 1, p_binding);
    INSERT INTO fencepost.job (tenant, operation, class, args, meaning, digest, accepted_epoch, epoch, source_event, priority, run_at,
        suspect, quiescent_at)
    VALUES (p_tenant, p_operation, p_class, p_args, v_meaning,
        fencepost.digest(p_tenant, p_operation, 'job:' || p_class, 1, v_epoch, p_binding), v_epoch, v_epoch, p_source_event,
        coalesce(p_priority, 0), coalesce(p_run_at, clock_timestamp()),
        v_suspect IS NOT NULL, v_suspect)
    ON CONFLICT (tenant, operation, class) DO NOTHING;
    IF FOUND THEN
        RETURN true;
    END IF;
    SELECT j.meaning INTO v_stored FROM fencepost.job AS j
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
    IF NOT FOUND THEN
        RAISE serialization_failure USING MESSAGE = 'the job was submitted after this snapshot', HINT = 'retry the transaction';
    ELSIF v_stored <> v_meaning THEN
        PERFORM fencepost._refuse('ZF010', 'the operation already has a job of this class with another meaning', 'operation',
            'a new request needs a new operation');
    END IF;
    RETURN false;
END $$;

-- After a restore: whether a job that comes again may have begun effects in what was lost, and when their calls are over; null
-- when it cannot. Its event was accepted before the recovery (the time in its UUIDv7, a minute of clock difference allowed), or
-- a runner's journal holds a begin of it.
CREATE OR REPLACE FUNCTION fencepost._suspect(p_tenant text, p_operation text, p_class text, p_source_event uuid)
RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT i.recovered_at + fencepost._longest_call(p_class)
    FROM fencepost.installation AS i
    WHERE i.recovered_at IS NOT NULL
      AND (fencepost._accepted_at(p_source_event) <= i.recovered_at + interval '1 minute'
           OR EXISTS (SELECT FROM fencepost.lost_begin AS b
                      WHERE b.tenant = p_tenant AND b.operation = p_operation AND b.class = p_class))
$$;

-- When an event was accepted, by its UUIDv7; minus infinity for any other UUID, null for none.
CREATE OR REPLACE FUNCTION fencepost._accepted_at(p_event uuid)
RETURNS timestamptz LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT CASE WHEN substr(p_event::text, 15, 1) = '7'
           THEN to_timestamp(('x' || substr(replace(p_event::text, '-', ''), 1, 12))::bit(48)::bigint / 1000.0)
           ELSE '-infinity' END
$$;

-- How long a call of this class can be under way after it was begun; two days where nobody says.
CREATE OR REPLACE FUNCTION fencepost._longest_call(p_class text)
RETURNS interval LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT c.max_effect_timeout + c.network_bound FROM fencepost.job_class AS c WHERE c.class = p_class), interval '2 days')
$$;


-- jobs/submit_many.sql
-- Schedules many jobs of one class in the caller's transaction, each as `submit` would; true for each that is new. One that
-- is refused refuses all of them: its number, from 1, is in the message.
-- Locks: none but the rows inserted, by tenant and operation.
CREATE OR REPLACE FUNCTION fencepost.submit_many(
    p_class text, p_tenants text[], p_operations text[], p_args bytea[], p_bindings text[], p_source_events uuid[],
    p_run_at timestamptz[], p_priorities integer[])
RETURNS boolean[] LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_count constant integer := cardinality(p_tenants);
    v_now constant timestamptz := clock_timestamp();
    v_new boolean[];
    v_other record;
    v_item bigint;
    v_recovered constant boolean := (SELECT i.recovered_at IS NOT NULL FROM fencepost.installation AS i);
BEGIN
    IF v_count IS NULL OR v_count NOT BETWEEN 1 AND 1000 THEN
        PERFORM fencepost._refuse('ZF003', 'not between 1 and 1000 jobs', 'jobs', 'submit them in several batches');
    ELSIF (cardinality(p_operations), cardinality(p_args), cardinality(p_bindings), cardinality(p_source_events),
           cardinality(p_run_at), cardinality(p_priorities)) IS DISTINCT FROM
          (v_count, v_count, v_count, v_count, v_count, v_count) THEN
        PERFORM fencepost._refuse('ZF003', 'the parts of the jobs are not equally many', 'jobs', 'give every part of every job');
    END IF;
    PERFORM fencepost._require_identity('class', p_class);
    PERFORM fencepost._require_identity('tenant', u.tenant) FROM (SELECT DISTINCT t.tenant FROM unnest(p_tenants) AS t (tenant)) AS u;
    PERFORM fencepost._require_identity('operation', u.operation), fencepost._require_binding(u.binding)
    FROM unnest(p_operations, p_bindings) AS u (operation, binding);
    SELECT min(u.item) INTO v_item FROM unnest(p_args) WITH ORDINALITY AS u (args, item)
    WHERE u.args IS NULL OR octet_length(u.args) > 1048576;
    IF v_item IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF003', format('args of job %s are null or larger than 1 MiB', v_item), 'args',
            'store them elsewhere and pass a reference');
    END IF;
    SELECT min(u.item) INTO v_item FROM unnest(p_run_at) WITH ORDINALITY AS u (run_at, item)
    WHERE u.run_at NOT BETWEEN '2000-01-01 00:00+00' AND v_now + interval '10 years';
    IF v_item IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF003', format('run_at of job %s is not within the next ten years', v_item), 'run_at',
            'give an instant with a time zone');
    END IF;
    SELECT min(u.item) INTO v_item FROM unnest(p_priorities) WITH ORDINALITY AS u (priority, item)
    WHERE u.priority NOT BETWEEN -1000000 AND 1000000;
    IF v_item IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF003', format('priority of job %s is not within a million', v_item), 'priority',
            'give a whole number from -1000000 to 1000000');
    END IF;
    WITH epoch AS MATERIALIZED (
        SELECT t.tenant, fencepost._epoch(t.tenant) AS epoch FROM (SELECT DISTINCT u.tenant FROM unnest(p_tenants) AS u (tenant)) AS t
    ), new AS (
        INSERT INTO fencepost.job (tenant, operation, class, args, meaning, digest, accepted_epoch, epoch, source_event, priority, run_at,
            suspect, quiescent_at)
        SELECT u.tenant, u.operation, p_class, u.args, fencepost.meaning(u.tenant, u.operation, 'job:' || p_class, 1, u.binding),
               fencepost.digest(u.tenant, u.operation, 'job:' || p_class, 1, e.epoch, u.binding), e.epoch, e.epoch, u.source_event,
               coalesce(u.priority, 0), coalesce(u.run_at, v_now), q.quiescent_at IS NOT NULL, q.quiescent_at
        FROM unnest(p_tenants, p_operations, p_args, p_bindings, p_source_events, p_run_at, p_priorities) WITH ORDINALITY
             AS u (tenant, operation, args, binding, source_event, run_at, priority, item)
        JOIN epoch AS e ON e.tenant = u.tenant
        CROSS JOIN LATERAL (
            SELECT CASE WHEN v_recovered THEN fencepost._suspect(u.tenant, u.operation, p_class, u.source_event) END AS quiescent_at) AS q
        ORDER BY u.tenant, u.operation, u.item
        ON CONFLICT (tenant, operation, class) DO NOTHING
        RETURNING job.tenant, job.operation
    )
    -- Of two alike in one call the first is the new one.
    SELECT array_agg(n.tenant IS NOT NULL AND u.rank = 1 ORDER BY u.item) INTO v_new
    FROM (SELECT w.*, row_number() OVER (PARTITION BY w.tenant, w.operation ORDER BY w.item) AS rank
          FROM unnest(p_tenants, p_operations) WITH ORDINALITY AS w (tenant, operation, item)) AS u
    LEFT JOIN new AS n ON n.tenant = u.tenant AND n.operation = u.operation;
    IF NOT false = ANY (v_new) THEN
        RETURN v_new;
    END IF;
    SELECT u.item, j.meaning INTO v_other
    FROM unnest(p_tenants, p_operations, p_bindings, v_new) WITH ORDINALITY AS u (tenant, operation, binding, new, item)
    LEFT JOIN fencepost.job AS j ON j.tenant = u.tenant AND j.operation = u.operation AND j.class = p_class
    WHERE NOT u.new
      AND j.meaning IS DISTINCT FROM fencepost.meaning(u.tenant, u.operation, 'job:' || p_class, 1, u.binding)
    ORDER BY u.item LIMIT 1;
    IF NOT FOUND THEN
        RETURN v_new;
    ELSIF v_other.meaning IS NULL THEN
        RAISE serialization_failure USING MESSAGE = 'a job was submitted after this snapshot', HINT = 'retry the transaction';
    END IF;
    PERFORM fencepost._refuse('ZF010',
        format('the operation of job %s already has a job of this class with another meaning', v_other.item), 'operation',
        'a new request needs a new operation');
END $$;


-- jobs/turn.sql
-- Locks due jobs of a class that has a limit or is fair, no more than its limits leave room for: from the most urgent
-- priority on, and within it the tenants in turn, each no more than its part of what is still to be had. Takes nothing
-- while another transaction claims jobs of this class: who runs would not be known. Locked, then looked at.
-- `p_taken`: tenants of what this claim has of the class already. `served`: who was served last at each priority, for the
-- next time; null where there is nothing to note.
CREATE OR REPLACE FUNCTION fencepost._take_turn(
    p_class text, p_priorities integer[], p_marks timestamptz[], p_now timestamptz, p_floor bigint, p_limit integer, p_but tid[],
    p_taken text[], INOUT served jsonb, OUT at tid[], OUT jobs tid[], OUT tenants text[], OUT operations text[])
LANGUAGE plpgsql AS $$
DECLARE
    v_class fencepost.job_class;
    v_turn fencepost.turn;
    v_running text[] := p_taken;
    v_left integer := p_limit;
    v_took record;
    v_next record;
    v_served jsonb;
    v_without text[];
    v_after text;
BEGIN
    at := '{}';
    SELECT k.* INTO v_class FROM fencepost.job_class AS k WHERE k.class = p_class FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT t.* INTO v_turn FROM fencepost.turn AS t WHERE t.class = p_class ORDER BY t.n DESC LIMIT 1;
    IF v_class.job_limit IS NOT NULL THEN
        v_running := v_running || ARRAY(
            SELECT h.tenant FROM unnest(v_turn.tenants, v_turn.operations, v_turn.generations) AS h (tenant, operation, generation)
            CROSS JOIN LATERAL (
                SELECT k.exec, k.generation FROM fencepost.job AS k
                WHERE k.tenant = h.tenant AND k.operation = h.operation AND k.class = p_class OFFSET 0) AS j
            WHERE j.exec = 'running' AND j.generation = h.generation);
        v_left := least(v_left, v_class.job_limit - cardinality(v_running));
    END IF;
    IF v_left <= 0 THEN
        served := NULL;
        RETURN;
    ELSIF NOT v_class.fair THEN
        SELECT coalesce(array_agg(t.at), '{}'), array_agg(t.job) INTO at, jobs
        FROM fencepost._take(p_class, p_priorities, p_marks, p_now, p_floor, v_left, p_but) AS t;
        SELECT array_agg(j.tenant), array_agg(j.operation) INTO tenants, operations FROM fencepost.job AS j WHERE j.ctid = ANY (jobs);
        served := CASE WHEN at <> '{}' THEN coalesce(served, v_turn.served, '{}') END;
        RETURN;
    END IF;
    v_served := coalesce(served, v_turn.served, '{}');
    served := NULL;
    FOR v_priority IN 1 .. cardinality(p_priorities) LOOP
        v_after := coalesce(v_served ->> p_priorities[v_priority]::text, '');
        v_without := '{}';
        WHILE v_left > 0 LOOP
            SELECT n.* INTO v_next FROM fencepost._next_tenants(p_class, p_priorities[v_priority], p_marks[v_priority], p_now,
                v_after, v_left, v_without || ARRAY(
                    SELECT r.tenant FROM unnest(v_running) AS r (tenant) GROUP BY r.tenant
                    HAVING count(*) >= v_class.tenant_limit)) AS n;
            v_after := coalesce(v_next.reached, v_after);
            EXIT WHEN v_next.tenants = '{}';
            SELECT coalesce(array_agg(d.at), '{}') AS at, array_agg(d.job) AS jobs, array_agg(d.tenant) AS tenants,
                   array_agg(d.operation) AS operations
            INTO v_took FROM (
                SELECT d.at, d.job, d.tenant, d.operation
                FROM unnest(v_next.tenants) WITH ORDINALITY AS u (tenant, n)
                CROSS JOIN LATERAL (
                    SELECT p.at, j.at AS job, p.tenant, p.operation FROM (
                        SELECT a.ctid AS at, a.tenant, a.operation, a.generation, a.epoch FROM fencepost.agenda AS a
                        WHERE a.fair_class = p_class AND a.priority = p_priorities[v_priority] AND a.tenant = u.tenant
                          AND a.due >= p_marks[v_priority] AND a.due <= p_now AND a.ctid <> ALL (p_but || at)
                          AND a.epoch = greatest(p_floor, (SELECT t.claimable FROM fencepost.tenant AS t WHERE t.tenant = a.tenant))
                        ORDER BY a.due) AS p
                    CROSS JOIN LATERAL (
                        SELECT k.ctid AS at FROM fencepost.job AS k
                        WHERE k.tenant = p.tenant AND k.operation = p.operation AND k.class = p_class
                          AND k.exec = 'queued' AND k.generation = p.generation AND k.priority = p_priorities[v_priority]
                          AND k.run_at <= p_now AND k.open_effects = 0 AND k.epoch = p.epoch
                        FOR NO KEY UPDATE SKIP LOCKED) AS j
                    LIMIT least(v_left / cardinality(v_next.tenants), v_class.tenant_limit
                                - (SELECT count(*) FROM unnest(v_running) AS r (tenant) WHERE r.tenant = u.tenant))) AS d
                LIMIT v_left) AS d;
            -- Who had less than its part has no more at this priority.
            v_without := v_without || ARRAY(
                SELECT u.tenant FROM unnest(v_next.tenants) AS u (tenant)
                WHERE (SELECT count(*) FROM unnest(v_took.tenants) AS d (tenant) WHERE d.tenant = u.tenant)
                      < v_left / cardinality(v_next.tenants));
            at := at || v_took.at;
            jobs := jobs || v_took.jobs;
            tenants := tenants || v_took.tenants;
            operations := operations || v_took.operations;
            v_running := v_running || v_took.tenants;
            v_left := v_left - cardinality(v_took.at);
        END LOOP;
        IF v_after <> coalesce(v_served ->> p_priorities[v_priority]::text, '') OR at <> '{}' THEN
            v_served := v_served || jsonb_build_object(p_priorities[v_priority], v_after);
            served := v_served;
        END IF;
        EXIT WHEN v_left = 0;
        PERFORM fencepost._forget_pointers(p_class, p_priorities[v_priority], p_marks[v_priority], p_now);
    END LOOP;
END $$;

-- Up to so many tenants with due jobs of a class and priority, in turn: those behind `p_after`, then from the first on.
-- Looks at each tenant once, and at a thousand at most: others may have work for later only. `reached`: where to go on.
CREATE OR REPLACE FUNCTION fencepost._next_tenants(
    p_class text, p_priority integer, p_mark timestamptz, p_now timestamptz, p_after text, p_limit integer, p_without text[],
    OUT tenants text[], OUT reached text) LANGUAGE sql AS $$
    WITH RECURSIVE walk (tenant, due, lap, n) AS (
        SELECT p_after, NULL::timestamptz, 0, 0
        UNION ALL
        SELECT f.tenant, f.due, f.lap, w.n + 1 FROM walk AS w CROSS JOIN LATERAL (
            (SELECT a.tenant, a.due, w.lap AS lap FROM fencepost.agenda AS a
             WHERE a.fair_class = p_class AND a.priority = p_priority AND a.tenant > w.tenant AND a.due >= p_mark
               AND (w.lap = 0 OR a.tenant <= p_after)
             ORDER BY a.tenant, a.due LIMIT 1)
            UNION ALL
            (SELECT '', NULL, 1 WHERE w.lap = 0)
            LIMIT 1) AS f
        WHERE w.n < 1000
    ), found AS MATERIALIZED (
        SELECT w.tenant, w.n FROM walk AS w WHERE w.due <= p_now AND w.tenant <> ALL (p_without) LIMIT p_limit
    )
    SELECT coalesce(array_agg(f.tenant ORDER BY f.n), '{}'),
           coalesce((array_agg(f.tenant ORDER BY f.n DESC))[1], (SELECT w.tenant FROM walk AS w WHERE w.n = 1000))
    FROM found AS f
$$;

-- Puts the row of a class in the place of the one before: who of it still runs, who runs now, and who was served last.
CREATE OR REPLACE FUNCTION fencepost._note_turn(p_class text, p_served jsonb, p_tenants text[], p_operations text[])
RETURNS void LANGUAGE sql AS $$
    WITH before AS (
        DELETE FROM fencepost.turn AS t WHERE t.class = p_class
          AND t.n = (SELECT u.n FROM fencepost.turn AS u WHERE u.class = p_class ORDER BY u.n DESC LIMIT 1)
        RETURNING t.*
    ), holder AS (
        SELECT j.tenant, j.operation, j.generation FROM before AS b
        CROSS JOIN LATERAL unnest(b.tenants, b.operations, b.generations) AS h (tenant, operation, generation)
        CROSS JOIN LATERAL (
            SELECT k.tenant, k.operation, k.exec, k.generation FROM fencepost.job AS k
            WHERE k.tenant = h.tenant AND k.operation = h.operation AND k.class = p_class OFFSET 0) AS j
        WHERE j.exec = 'running' AND j.generation = h.generation
        UNION
        SELECT j.tenant, j.operation, j.generation FROM unnest(p_tenants, p_operations) AS h (tenant, operation)
        CROSS JOIN LATERAL (
            SELECT k.tenant, k.operation, k.exec, k.generation FROM fencepost.job AS k
            WHERE k.tenant = h.tenant AND k.operation = h.operation AND k.class = p_class OFFSET 0) AS j
        WHERE j.exec = 'running'
    )
    INSERT INTO fencepost.turn (class, n, served, tenants, operations, generations)
    SELECT p_class, coalesce((SELECT b.n FROM before AS b), 0) + 1,
           -- Whose turn it was is forgotten where there are priorities without end.
           CASE WHEN octet_length(p_served::text) > 100000 THEN '{}'
                ELSE coalesce(p_served, (SELECT b.served FROM before AS b), '{}') END, coalesce(array_agg(h.tenant), '{}'),
           coalesce(array_agg(h.operation), '{}'), coalesce(array_agg(h.generation), '{}')
    FROM holder AS h WHERE (SELECT k.job_limit FROM fencepost.job_class AS k WHERE k.class = p_class) IS NOT NULL
$$;


-- jobs/wait.sql
-- Ends the current attempt until a signal arrives or a time comes, whichever is first; the attempt is not charged. Returns
-- null when the job sleeps; else what it would have waited for, and the attempt goes on: the number of the first signal of
-- that name, or 0 when the time has come. `p_after` counts from the first wait for this signal, without one from now.
-- Locks: gate, then the job row.
CREATE OR REPLACE FUNCTION fencepost.wait(
    p_tenant text, p_operation text, p_class text, p_generation bigint, p_attempt uuid, p_owner text, p_epoch bigint,
    p_signal text, p_until timestamptz, p_after interval)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_job fencepost.job;
    v_wait fencepost.wait;
    v_until timestamptz;
    v_answer bigint;
BEGIN
    IF p_signal IS NOT NULL THEN
        PERFORM fencepost._require_identity('signal', p_signal);
    ELSIF p_until IS NULL AND p_after IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'neither a signal nor a time is waited for', 'signal', 'give signal, until or both');
    END IF;
    IF p_until IS NOT NULL AND (p_after IS NOT NULL
                                OR p_until NOT BETWEEN '2000-01-01 00:00+00' AND clock_timestamp() + interval '10 years') THEN
        PERFORM fencepost._refuse('ZF003', 'until is not one instant within the next ten years', 'until',
            'give an instant with a time zone, or a time from now');
    ELSIF p_after NOT BETWEEN interval '1 ms' AND interval '3653 days' THEN
        PERFORM fencepost._refuse('ZF003', 'until is not between a millisecond and ten years away', 'until', NULL);
    END IF;
    v_job := fencepost._fence(p_tenant, p_operation, p_class, p_generation, p_attempt, p_owner, p_epoch);
    IF v_job.open_effects > 0 THEN
        PERFORM fencepost._refuse('ZF030', 'an effect of this job is pending or unknown', 'effect', 'record or reconcile it first');
    END IF;
    SELECT w.* INTO v_wait FROM fencepost.wait AS w
    WHERE w.tenant = p_tenant AND w.operation = p_operation AND w.class = p_class AND w.signal = coalesce(p_signal, '');
    v_until := coalesce(p_until, CASE WHEN p_signal IS NULL OR v_wait.began_at IS NULL THEN clock_timestamp()
                                 ELSE v_wait.began_at END + p_after);
    v_answer := v_wait.answer;
    IF v_answer IS NULL THEN
        SELECT min(s.n) INTO v_answer FROM fencepost.signal AS s
        WHERE s.tenant = p_tenant AND s.operation = p_operation AND s.class = p_class AND s.name = p_signal;
    END IF;
    IF v_answer IS NULL AND v_until <= clock_timestamp() THEN
        v_answer := 0;
    END IF;
    IF v_answer IS NOT NULL THEN
        IF p_signal IS NOT NULL AND v_wait.answer IS NULL THEN
            INSERT INTO fencepost.wait AS w (tenant, operation, class, signal, generation, answer)
            VALUES (p_tenant, p_operation, p_class, p_signal, v_job.generation, v_answer)
            ON CONFLICT (tenant, operation, class, signal) DO UPDATE SET answer = v_answer;
        END IF;
        RETURN v_answer;
    END IF;
    UPDATE fencepost.job AS j SET exec = 'waiting', generation = j.generation + 1, attempt = NULL, owner = NULL, lease_until = NULL,
        attempts = greatest(j.attempts - CASE j.mode WHEN 'execute' THEN 1 ELSE 0 END, 0),
        finishes = greatest(j.finishes - CASE j.mode WHEN 'finish' THEN 1 ELSE 0 END, 0),
        reason = CASE WHEN p_signal IS NULL THEN 'waiting_for_time' ELSE 'waiting_for_signal' END,
        detail = coalesce(p_signal, ''), changed_at = clock_timestamp()
    WHERE j.tenant = p_tenant AND j.operation = p_operation AND j.class = p_class;
    INSERT INTO fencepost.wait AS w (tenant, operation, class, signal, generation, until)
    VALUES (p_tenant, p_operation, p_class, coalesce(p_signal, ''), v_job.generation + 1, v_until)
    ON CONFLICT (tenant, operation, class, signal) DO UPDATE SET generation = v_job.generation + 1, until = v_until;
    RETURN NULL;
END $$;

-- Whoever goes to sleep is looked at when its time comes and, where it waits for a signal, once right after its commit.
-- Invariant: a signal and a wait that do not see each other are looked at by whichever commits later: each leaves a pointer
-- of its own, and the look that uses it sees both. The pointers are in the agenda under the priority 2147483646.
CREATE OR REPLACE FUNCTION fencepost._wait_pointers()
RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fencepost.agenda (class, priority, due, tenant, operation, generation, epoch)
    SELECT NEW.class, 2147483646, greatest(d.due, clock_timestamp()), NEW.tenant, NEW.operation, NEW.generation, 0
    FROM (SELECT NEW.until WHERE NEW.until IS NOT NULL UNION ALL SELECT clock_timestamp() WHERE NEW.signal <> '') AS d (due);
    RETURN NULL;
END $$;
-- Locks: none where the trigger exists.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'fencepost.wait'::regclass AND tgname = 'wait_pointers') THEN
        CREATE TRIGGER wait_pointers AFTER INSERT OR UPDATE ON fencepost.wait FOR EACH ROW
        WHEN (NEW.answer IS NULL) EXECUTE FUNCTION fencepost._wait_pointers();
    END IF;
END $$;

-- Queues waiting jobs whose signal has arrived or whose time has come, each at most once; called by every claim.
-- Invariant: what is pointed to is reached by key in a sub-select of its own, or by the place of a row that is locked; there
-- is no other plan.
-- Locks: agenda rows and job rows that nobody else holds; a job that somebody holds keeps its pointer for the next look.
CREATE OR REPLACE FUNCTION fencepost._wake(p_classes text[], p_limit integer, p_marks jsonb DEFAULT NULL)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_class text;
    v_mark timestamptz;
    v_over record;
    v_held record;
BEGIN
    FOR v_class IN SELECT DISTINCT u.class FROM unnest(p_classes) AS u (class) LOOP
        v_mark := coalesce((p_marks -> 'priorities' -> v_class ->> '2147483646')::timestamptz, '-infinity');
        CONTINUE WHEN NOT EXISTS (SELECT FROM fencepost.agenda AS a
                                  WHERE a.class = v_class AND a.priority = 2147483646 AND a.due <= v_now AND a.due >= v_mark);
        WITH seen AS MATERIALIZED (
            SELECT a.ctid AS at, a.tenant, a.operation, j.generation,
                   coalesce(j.waiting AND (w.until <= v_now OR s.arrived), false) AS over
            FROM fencepost.agenda AS a
            LEFT JOIN LATERAL (
                SELECT k.generation, k.exec = 'waiting' AS waiting FROM fencepost.job AS k
                WHERE k.tenant = a.tenant AND k.operation = a.operation AND k.class = a.class OFFSET 0) AS j ON true
            LEFT JOIN LATERAL (
                SELECT k.signal, k.until FROM fencepost.wait AS k
                WHERE k.tenant = a.tenant AND k.operation = a.operation AND k.class = a.class
                  AND k.generation = j.generation AND k.answer IS NULL LIMIT 1) AS w ON true
            LEFT JOIN LATERAL (
                SELECT true AS arrived FROM fencepost.signal AS k
                WHERE k.tenant = a.tenant AND k.operation = a.operation AND k.class = a.class AND k.name = w.signal LIMIT 1) AS s ON true
            WHERE a.class = v_class AND a.priority = 2147483646 AND a.due <= v_now AND a.due >= v_mark
            ORDER BY a.due LIMIT p_limit FOR UPDATE OF a SKIP LOCKED
        ), used AS (
            DELETE FROM fencepost.agenda AS a USING seen AS s WHERE a.ctid = s.at AND NOT s.over
        )
        SELECT array_agg(s.at) AS at, array_agg(s.tenant) AS tenants, array_agg(s.operation) AS operations,
               array_agg(s.generation) AS generations INTO v_over
        FROM seen AS s WHERE s.over;
        CONTINUE WHEN v_over.at IS NULL;
        SELECT array_agg(h.at) AS at, array_agg(h.job) AS jobs INTO v_held FROM (
            SELECT u.at, j.at AS job
            FROM unnest(v_over.at, v_over.tenants, v_over.operations, v_over.generations) AS u (at, tenant, operation, generation)
            CROSS JOIN LATERAL (
                SELECT k.ctid AS at FROM fencepost.job AS k
                WHERE k.tenant = u.tenant AND k.operation = u.operation AND k.class = v_class
                  AND k.exec = 'waiting' AND k.generation = u.generation
                FOR NO KEY UPDATE SKIP LOCKED) AS j) AS h;
        UPDATE fencepost.job AS j SET exec = 'queued', run_at = clock_timestamp(), reason = 'woken', changed_at = clock_timestamp()
        FROM unnest(v_held.jobs) AS h (job) WHERE j.ctid = h.job AND j.exec = 'waiting';
        DELETE FROM fencepost.agenda AS a WHERE a.ctid = ANY (v_held.at);
    END LOOP;
END $$;


-- outbox/enqueue.sql
-- Accepts an event in the caller's transaction: committed with the domain change or not at all.
-- The same operation and type again returns the first event id; with another meaning it is a conflict (ZF010).
CREATE OR REPLACE FUNCTION fencepost.enqueue(
    p_event_id uuid, p_tenant text, p_operation text, p_type text, p_version integer, p_ordering_key text,
    p_binding text, p_content_type text, p_attributes jsonb, p_payload bytea, p_serialize boolean DEFAULT false,
    OUT event_id uuid, OUT created boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_installation fencepost.installation;
    v_xid xid8;
    v_epoch bigint;
    v_meaning bytea;
    v_now timestamptz := clock_timestamp();
    v_key record;
    v_lane bytea;
BEGIN
    PERFORM fencepost._require_identity('tenant', p_tenant);
    PERFORM fencepost._require_identity('operation', p_operation);
    PERFORM fencepost._require_identity('ordering_key', p_ordering_key);
    PERFORM fencepost._require_binding(p_binding);
    IF p_event_id IS NULL THEN
        PERFORM fencepost._refuse('ZF003', 'event_id is null', 'event_id', 'make a UUIDv7 at acceptance');
    ELSIF p_type IS NULL OR p_type !~ '^[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*$' OR length(p_type) > 120 THEN
        PERFORM fencepost._refuse('ZF003', 'type is not dotted lower-case words of at most 120 characters', 'type', 'example: report.accepted');
    ELSIF p_version IS NULL OR p_version NOT BETWEEN 1 AND 32767 THEN
        PERFORM fencepost._refuse('ZF003', 'version is not between 1 and 32767', 'version', NULL);
    ELSIF p_type ~ '\.v[0-9]+$' THEN
        PERFORM fencepost._refuse('ZF003', 'type ends in a version', 'type', 'the version is an argument of its own');
    ELSIF p_content_type IS DISTINCT FROM 'application/json' THEN
        PERFORM fencepost._refuse('ZF003', 'content_type is not application/json', 'content_type', 'other content travels by reference');
    ELSIF p_payload IS NULL OR octet_length(p_payload) NOT BETWEEN 1 AND 1048576 THEN
        PERFORM fencepost._refuse('ZF003', 'payload is empty or larger than 1 MiB', 'payload', 'store it elsewhere and send a reference');
    END IF;

    -- Invariant: the transaction id is assigned before the sequence is drawn; ticks rely on it.
    v_xid := pg_current_xact_id();
    SELECT * INTO STRICT v_installation FROM fencepost.installation;
    v_epoch := fencepost._epoch(p_tenant);
    v_meaning := fencepost.meaning(p_tenant, p_operation, p_type, p_version, p_binding);

    INSERT INTO fencepost.event_key (tenant, operation, type, event_id, meaning, recorded_at)
    VALUES (p_tenant, p_operation, p_type, p_event_id, v_meaning, v_now)
    ON CONFLICT (tenant, operation, type) DO NOTHING;
    IF NOT FOUND THEN
        SELECT k.event_id, k.meaning INTO v_key FROM fencepost.event_key AS k
        WHERE k.tenant = p_tenant AND k.operation = p_operation AND k.type = p_type;
        IF NOT FOUND THEN
            RAISE serialization_failure USING MESSAGE = 'the operation was accepted after this snapshot', HINT = 'retry the transaction';
        ELSIF v_key.meaning <> v_meaning THEN
            PERFORM fencepost._refuse('ZF010', 'the operation was already accepted with another meaning', 'operation',
                'a new request needs a new operation; a repeated one must carry the same content and version');
        END IF;
        event_id := v_key.event_id;
        created := false;
        RETURN;
    END IF;

    v_lane := sha256(int4send(octet_length(convert_to(p_tenant, 'UTF8'))) || convert_to(p_tenant, 'UTF8')
                     || convert_to(p_ordering_key, 'UTF8'));
    IF p_serialize THEN
        -- Locks: taken as late as possible, held to the end of the transaction; a collision only serialises more.
        PERFORM pg_advisory_xact_lock(('x' || encode(substr(v_lane, 9, 8), 'hex'))::bit(64)::bigint);
    END IF;
    INSERT INTO fencepost.outbox (child, slot, seq, xid, era, event_id, tenant, operation, type, version, epoch,
        ordering_key, digest, recorded_at, content_type, attributes, reference, payload)
    VALUES (v_installation.outbox_child,
        ((('x' || encode(substr(v_lane, 1, 4), 'hex'))::bit(32)::bigint & 2147483647) % v_installation.slots)::integer,
        nextval('fencepost.outbox_seq'), v_xid, v_installation.era, p_event_id, p_tenant, p_operation, p_type, p_version,
        v_epoch, p_ordering_key,
        fencepost.digest(p_tenant, p_operation, p_type, p_version, v_epoch, p_binding), v_now, p_content_type,
        p_attributes, CASE WHEN p_binding LIKE 'ref:%' THEN p_binding END, p_payload);
    -- Rings only while a relay sleeps (see doze); one look at a sequence otherwise.
    IF pg_sequence_last_value('fencepost.doorbell') > (extract(epoch FROM v_now) * 1000000)::bigint THEN
        PERFORM pg_notify('fencepost', pg_sequence_last_value('fencepost.doorbell')::text);
    END IF;
    event_id := p_event_id;
    created := true;
END $$;


-- relay/ack.sql
-- Records progress of slots after the broker's confirms; sets refused events aside, and says what was overtaken, in the same
-- commit.
-- Refused as a whole (ZF040) when one slot was taken over: its new owner sends that page again, with the same bytes.
CREATE OR REPLACE FUNCTION fencepost.ack(
    p_destination text, p_owner uuid, p_slots integer[], p_generations bigint[], p_era integer,
    p_acked_ticks bigint[], p_end_ticks bigint[], p_positions bigint[],
    p_park_slots integer[] DEFAULT '{}', p_park_seqs bigint[] DEFAULT '{}', p_park_reasons text[] DEFAULT '{}',
    p_park_details text[] DEFAULT '{}', p_park_overtaken bigint[] DEFAULT '{}', p_park_retry interval[] DEFAULT '{}',
    p_overtaken_slots integer[] DEFAULT '{}', p_overtaken_seqs bigint[] DEFAULT '{}', p_overtaken_by bigint[] DEFAULT '{}')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count bigint;
BEGIN
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM fencepost._require_slots(p_destination, p_owner, p_slots, p_generations);
    IF p_era <> (SELECT i.era FROM fencepost.installation AS i) THEN
        PERFORM fencepost._refuse('ZF040', 'a new era has begun', 'era', 'lease the slots again');
    END IF;
    -- Crash here: [A] between confirm and this commit: the page is sent again by whoever owns the slot next.
    INSERT INTO fencepost.ack (child, destination, slot, n, era, acked_tick, end_tick, position, generation)
    SELECT i.ack_child, p_destination, u.slot, nextval('fencepost.ack_seq'), p_era, u.acked, u.ending, u.position, u.generation
    FROM unnest(p_slots, p_generations, p_acked_ticks, p_end_ticks, p_positions) AS u (slot, generation, acked, ending, position),
         fencepost.installation AS i;
    IF cardinality(p_overtaken_seqs) > 0 THEN
        DELETE FROM fencepost.overtaken AS g
        WHERE g.at < clock_timestamp() - (SELECT i.replay_window FROM fencepost.installation AS i);
        INSERT INTO fencepost.overtaken AS g (destination, seq, overtaken_by, tenant, ordering_key, operation, type)
        SELECT p_destination, o.seq, u.overtaken_by, o.tenant, o.ordering_key, o.operation, o.type
        FROM unnest(p_overtaken_slots, p_overtaken_seqs, p_overtaken_by) AS u (slot, seq, overtaken_by)
        JOIN fencepost.outbox AS o ON o.slot = u.slot AND o.seq = u.seq
        WHERE o.slot = ANY (p_slots)
        -- Sent again once more after a lost lease.
        ON CONFLICT (destination, seq) DO UPDATE SET overtaken_by = excluded.overtaken_by, at = excluded.at;
    END IF;
    IF cardinality(p_park_seqs) > 0 THEN
        INSERT INTO fencepost.parked (destination, slot, tenant, ordering_key, seq, event_id, operation, type, version, epoch,
            digest, recorded_at, content_type, attributes, reference, payload, reason, detail, overtaken_by, attempts, next_try_at)
        SELECT p_destination, o.slot, o.tenant, o.ordering_key, o.seq, o.event_id, o.operation, o.type, o.version, o.epoch,
               o.digest, o.recorded_at, o.content_type, o.attributes, o.reference, o.payload, u.reason, u.detail,
               -- A later one may have got through while this one still had no answer.
               coalesce(u.overtaken, (SELECT g.overtaken_by FROM fencepost.overtaken AS g
                                      WHERE g.destination = p_destination AND g.seq = o.seq)),
               CASE u.reason WHEN 'behind' THEN 0 ELSE 1 END,
               CASE WHEN u.retry IS NULL THEN NULL ELSE clock_timestamp() + u.retry END
        FROM unnest(p_park_slots, p_park_seqs, p_park_reasons, p_park_details, p_park_overtaken, p_park_retry)
             AS u (slot, seq, reason, detail, overtaken, retry)
        JOIN fencepost.outbox AS o ON o.slot = u.slot AND o.seq = u.seq
        WHERE o.slot = ANY (p_slots);
        GET DIAGNOSTICS v_count = ROW_COUNT;
        IF v_count <> cardinality(p_park_seqs) THEN
            PERFORM fencepost._refuse('ZF003', 'a parked event is not in the outbox', 'park_seqs', NULL);
        END IF;
        -- What its relay set aside behind an event that is no longer there (skipped meanwhile, or a later number of a key
        -- whose writers did not take turns) waits for nothing.
        UPDATE fencepost.parked AS k SET next_try_at = clock_timestamp()
        FROM unnest(p_park_slots, p_park_seqs) AS u (slot, seq)
        WHERE k.destination = p_destination AND k.slot = u.slot AND k.seq = u.seq AND k.reason = 'behind'
          AND (NOT EXISTS (SELECT FROM fencepost.parked AS e
                           WHERE e.destination = k.destination AND e.slot = k.slot AND e.tenant = k.tenant
                             AND e.ordering_key = k.ordering_key AND e.seq < k.seq)
               OR 'pass' = (SELECT d.on_refusal FROM fencepost.destination AS d WHERE d.destination = p_destination));
    END IF;
END $$;

-- Records one retry of a parked event: published ones leave, and the key flows again with its last one.
CREATE OR REPLACE FUNCTION fencepost.retried(
    p_destination text, p_owner uuid, p_slot integer, p_generation bigint, p_tenant text, p_ordering_key text, p_seq bigint,
    p_published boolean, p_reason text, p_detail text, p_retry interval)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._enter();
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM fencepost._require_slots(p_destination, p_owner, ARRAY[p_slot], ARRAY[p_generation]);
    IF p_published THEN
        -- Crash here: [Q2] until this commits it stays parked and is sent again; with it the next of its key is due.
        DELETE FROM fencepost.parked AS k
        WHERE k.destination = p_destination AND k.slot = p_slot AND k.tenant = p_tenant
          AND k.ordering_key = p_ordering_key AND k.seq = p_seq;
        UPDATE fencepost.parked AS k SET next_try_at = clock_timestamp()
        WHERE k.destination = p_destination AND k.slot = p_slot AND k.tenant = p_tenant AND k.ordering_key = p_ordering_key
          AND k.seq = (SELECT min(f.seq) FROM fencepost.parked AS f
                       WHERE f.destination = p_destination AND f.slot = p_slot AND f.tenant = p_tenant
                         AND f.ordering_key = p_ordering_key);
    ELSE
        UPDATE fencepost.parked AS k SET attempts = k.attempts + 1, reason = p_reason, detail = p_detail,
               next_try_at = clock_timestamp() + p_retry
        WHERE k.destination = p_destination AND k.slot = p_slot AND k.tenant = p_tenant
          AND k.ordering_key = p_ordering_key AND k.seq = p_seq;
    END IF;
END $$;


-- relay/destination.sql
-- Registers a destination, or confirms that it still is as it was registered (else ZF041): kind, routes, and what a
-- refusal does to its key. The first destination of an installation starts at the very first event, and so do those that
-- are registered before anything was published; a later one starts at the newest tick. The reserved destination `-` finds
-- the types that no destination has a route for.
CREATE OR REPLACE FUNCTION fencepost.register_destination(
    p_destination text, p_kind text, p_routes jsonb, p_accept_routes boolean DEFAULT false, p_on_refusal text DEFAULT 'block')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_digest bytea := sha256(convert_to(p_routes::text, 'UTF8'));
    v_stored fencepost.destination;
    v_matches text[];
    v_first boolean;
    v_early boolean;
    v_name text;
BEGIN
    PERFORM fencepost._enter();
    IF p_destination IS NULL OR p_destination !~ '^[a-z][a-z0-9_-]{0,40}$' THEN
        PERFORM fencepost._refuse('ZF003', 'destination is not a lower-case name of at most 41 characters', 'destination', NULL);
    ELSIF p_kind IS NULL OR p_kind NOT IN ('kafka', 'rabbitmq') THEN
        PERFORM fencepost._refuse('ZF003', 'kind is neither kafka nor rabbitmq', 'kind', NULL);
    ELSIF p_on_refusal IS NULL OR p_on_refusal NOT IN ('block', 'pass') THEN
        PERFORM fencepost._refuse('ZF003', 'on_refusal is neither block nor pass', 'on_refusal', NULL);
    ELSIF jsonb_typeof(p_routes) IS DISTINCT FROM 'array' OR jsonb_array_length(p_routes) = 0 THEN
        PERFORM fencepost._refuse('ZF003', 'routes are empty', 'routes', 'give at least one route');
    END IF;
    SELECT array_agg(r ->> 'match') INTO v_matches FROM jsonb_array_elements(p_routes) AS r;
    IF array_position(v_matches, NULL) IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF003', 'a route has no match', 'routes', 'give a type, a prefix ending in .* or *');
    END IF;
    -- A relay that comes back with what is registered waits for nobody, and nobody for it.
    IF EXISTS (SELECT FROM fencepost.destination AS d
               WHERE d.destination = p_destination AND d.routes_digest = v_digest AND d.kind = p_kind
                 AND d.on_refusal = p_on_refusal) THEN
        RETURN;
    END IF;
    LOCK TABLE fencepost.destination IN SHARE ROW EXCLUSIVE MODE;
    SELECT * INTO v_stored FROM fencepost.destination AS d WHERE d.destination = p_destination;
    IF FOUND THEN
        IF v_stored.routes_digest = v_digest AND v_stored.kind = p_kind AND v_stored.on_refusal = p_on_refusal THEN
            RETURN;
        ELSIF NOT p_accept_routes THEN
            PERFORM fencepost._refuse('ZF041', 'the destination was registered with other routes',
                CASE WHEN v_stored.routes_digest = v_digest AND v_stored.kind = p_kind THEN 'on_refusal' ELSE 'routes' END,
                'start one relay with --accept-routes once every relay has the new settings');
        END IF;
        UPDATE fencepost.destination AS d
        SET kind = p_kind, routes = p_routes, routes_digest = v_digest, on_refusal = p_on_refusal
        WHERE d.destination = p_destination;
        PERFORM fencepost._span_routes(p_destination, v_matches, false);
        -- Where keys no longer wait, nothing is left to wait for.
        -- Locks: the slots, so that an ack of a relay with the old settings comes before this or knows of it.
        PERFORM FROM fencepost.slot AS s WHERE s.destination = p_destination ORDER BY s.slot FOR NO KEY UPDATE;
        UPDATE fencepost.parked AS k SET next_try_at = clock_timestamp()
        WHERE k.destination = p_destination AND k.reason = 'behind' AND p_on_refusal = 'pass';
        INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
        VALUES (gen_random_uuid(), 'routes', session_user, 'accept routes', p_destination, encode(v_digest, 'hex'));
        RETURN;
    END IF;
    LOCK TABLE fencepost.tick_gate IN EXCLUSIVE MODE;
    v_first := NOT EXISTS (SELECT FROM fencepost.destination);
    -- The very first event can be sent only as long as nothing was recycled since.
    v_early := (v_first OR NOT EXISTS (SELECT FROM fencepost.tick AS t WHERE t.era > 1 OR t.n > 0))
               AND EXISTS (SELECT FROM fencepost.recycled AS r WHERE r.seq = 0)
               AND EXISTS (SELECT FROM fencepost.tick AS t WHERE t.n = 0);
    FOREACH v_name IN ARRAY CASE WHEN v_first THEN ARRAY['-', p_destination] ELSE ARRAY[p_destination] END LOOP
        INSERT INTO fencepost.destination (destination, kind, routes, routes_digest, on_refusal, start_era, start_tick)
        SELECT v_name, CASE v_name WHEN '-' THEN 'none' ELSE p_kind END,
               CASE v_name WHEN '-' THEN '[]' ELSE p_routes END,
               CASE v_name WHEN '-' THEN sha256('') ELSE v_digest END,
               CASE v_name WHEN '-' THEN 'block' ELSE p_on_refusal END, t.era,
               CASE WHEN v_early THEN 0 ELSE t.n END
        FROM fencepost.tick AS t ORDER BY t.era DESC, t.n DESC LIMIT 1;
        INSERT INTO fencepost.slot (destination, slot)
        SELECT v_name, s FROM fencepost.installation AS i, generate_series(0, i.slots - 1) AS s;
    END LOOP;
    PERFORM fencepost._span_routes(p_destination, v_matches, v_early);
END $$;

-- Takes a destination away with its progress, on an operator's word. Refused while a relay serves it, and while it has
-- unsent or parked events, unless losing them is said aloud. What nobody has looked at yet becomes `-`'s business.
CREATE OR REPLACE FUNCTION fencepost.remove_destination(
    p_destination text, p_actor text, p_reason text, p_lose boolean DEFAULT false, OUT unsent bigint, OUT parked bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_most CONSTANT bigint := 1000000;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    LOCK TABLE fencepost.destination IN SHARE ROW EXCLUSIVE MODE;
    LOCK TABLE fencepost.tick_gate IN EXCLUSIVE MODE;
    PERFORM FROM fencepost.destination AS d WHERE d.destination = p_destination AND d.destination <> '-' FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such destination', 'destination', 'see: fencepost relay destinations');
    ELSIF EXISTS (SELECT FROM fencepost.relay AS r WHERE r.destination = p_destination AND r.lease_until > clock_timestamp()) THEN
        PERFORM fencepost._refuse('ZF003', 'a relay serves this destination', 'destination',
            'take it out of the settings of every relay, stop those relays, then remove it');
    END IF;
    unsent := fencepost._unsent(p_destination, v_most);
    SELECT count(*) INTO parked FROM fencepost.parked AS k WHERE k.destination = p_destination;
    IF unsent + parked > 0 AND p_lose IS NOT TRUE THEN
        PERFORM fencepost._refuse('ZF003', unsent || ' events are unsent and ' || parked || ' are parked', 'lose',
            'let a relay finish first, or lose them: --yes-lose');
    END IF;
    DELETE FROM fencepost.parked AS k WHERE k.destination = p_destination;
    DELETE FROM fencepost.overtaken AS g WHERE g.destination = p_destination;
    DELETE FROM fencepost.ack AS k WHERE k.destination = p_destination;
    DELETE FROM fencepost.relay AS r WHERE r.destination = p_destination;
    DELETE FROM fencepost.slot AS s WHERE s.destination = p_destination;
    DELETE FROM fencepost.route AS r WHERE r.destination = p_destination;
    DELETE FROM fencepost.destination AS d WHERE d.destination = p_destination;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict, evidence_ref)
    VALUES (gen_random_uuid(), 'remove_destination', p_actor, p_reason, p_destination, 'removed',
            'unsent ' || unsent || ', parked ' || parked);
END $$;


-- relay/doorbell.sql
-- Marks that a relay sleeps for so long. True when every event that commits from now on will ring or is visible to the next
-- look; false while a writer that may have read the mark before is still open: then look again soon.
-- Locks: relays change the mark one after the other, and only for the time of this call.
CREATE OR REPLACE FUNCTION fencepost.doze(p_for interval) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_until bigint := (extract(epoch FROM clock_timestamp() + p_for) * 1000000)::bigint;
BEGIN
    PERFORM fencepost._enter();
    IF p_for IS NULL OR p_for NOT BETWEEN interval '0' AND interval '10 minutes' THEN
        PERFORM fencepost._refuse('ZF003', 'the sleep is not between 0 and 10 minutes', 'for', NULL);
    END IF;
    PERFORM pg_advisory_xact_lock(1179665234, 1);
    -- Invariant: every doze changes the mark, so that a ring for an older one cannot take it away.
    PERFORM setval('fencepost.doorbell', greatest(coalesce(pg_sequence_last_value('fencepost.doorbell'), 0) + 1, v_until));
    -- Who writes an event locks this table before it reads the mark, and until its end.
    RETURN NOT EXISTS (
        SELECT FROM pg_locks AS l
        WHERE l.locktype = 'relation' AND l.relation = 'fencepost.event_key'::regclass AND l.mode = 'RowExclusiveLock'
          AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database()) AND l.granted);
END $$;

-- Everybody who slept under this mark was rung: nobody rings again, unless somebody fell asleep since.
CREATE OR REPLACE FUNCTION fencepost.rung(p_mark bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM fencepost._enter();
    PERFORM pg_advisory_xact_lock(1179665234, 1);
    IF pg_sequence_last_value('fencepost.doorbell') = p_mark THEN
        PERFORM setval('fencepost.doorbell', 0);
    END IF;
END $$;


-- relay/late_rows.sql
-- Slots with rows below the earlier tick's hint that only the later tick sees, and where these rows begin.
CREATE OR REPLACE FUNCTION fencepost.late_rows(p_era integer, p_start bigint, p_end bigint)
RETURNS TABLE (slot integer, first_seq bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_start fencepost.tick;
    v_end fencepost.tick;
BEGIN
    SELECT t.* INTO v_start FROM fencepost.tick AS t WHERE t.era = p_era AND t.n = p_start;
    SELECT t.* INTO v_end FROM fencepost.tick AS t WHERE t.era = p_era AND t.n = p_end;
    IF v_start.n IS NULL OR v_end.n IS NULL THEN
        PERFORM fencepost._refuse('ZF040', 'the ticks of this page are gone', 'slot', 'lease the slots again: they moved on');
    END IF;
    RETURN QUERY
    SELECT late.slot, min(late.seq) FROM (
        SELECT o.slot, o.seq, o.xid FROM fencepost.outbox AS o WHERE o.xid = ANY (v_start.snap_xip)
        UNION ALL
        SELECT o.slot, o.seq, o.xid FROM fencepost.outbox AS o WHERE o.xid >= v_start.snap_xmax AND o.xid < v_start.next) AS late
    WHERE late.seq <= v_start.hint AND pg_visible_in_snapshot(late.xid, v_end.snap)
    GROUP BY late.slot;
END $$;


-- relay/parked.sql
-- Operators' acts on parked events. None of them publishes: the slot's owner does, in the order of the key.
-- Locks: the slots concerned, by destination, so that acts and acks of a slot come one after the other.

-- Marks a parked event due. One without a route moves to every destination that has one now and does not answer for it
-- anyway, to its place in the order of its key there; refused while there is none. Returns due, or moved with the destinations.
CREATE OR REPLACE FUNCTION fencepost.retry_parked(
    p_destination text, p_seq bigint, p_actor text, p_reason text, OUT verdict text, OUT destinations text[])
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_parked fencepost.parked;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    SELECT k.* INTO v_parked FROM fencepost.parked AS k WHERE k.destination = p_destination AND k.seq = p_seq;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such parked event', 'seq', 'see: fencepost parked list');
    END IF;
    destinations := ARRAY[p_destination];
    verdict := 'due';
    IF v_parked.reason = 'no_route' THEN
        SELECT coalesce(array_agg(f.destination ORDER BY f.destination), '{}') INTO destinations FROM (
            SELECT d.destination FROM fencepost.destination AS d
            WHERE EXISTS (SELECT FROM fencepost.route AS r
                          WHERE r.destination = d.destination AND r.until IS NULL
                            AND fencepost._matches(r.match, v_parked.type))
              AND (d.destination = p_destination
                   -- One that answers for the event publishes or parks it by itself.
                   OR NOT EXISTS (SELECT FROM fencepost.route AS r
                                  WHERE r.destination = d.destination AND fencepost._matches(r.match, v_parked.type)
                                    AND p_seq > r.since AND (r.until IS NULL OR p_seq <= r.until)))
            FOR KEY SHARE OF d) AS f;
        IF destinations = '{}' THEN
            PERFORM fencepost._refuse('ZF003', 'no destination has a route for ' || v_parked.type, 'type',
                'add a route, start a relay with --accept-routes, then retry; or skip it: where it had a route, it is sent anyway');
        ELSIF p_destination = ANY (destinations) THEN
            destinations := ARRAY[p_destination];
        ELSE
            verdict := 'moved';
        END IF;
    END IF;
    PERFORM FROM fencepost.slot AS s
    WHERE s.slot = v_parked.slot AND (s.destination = p_destination OR s.destination = ANY (destinations))
    ORDER BY s.destination FOR NO KEY UPDATE;
    UPDATE fencepost.slot AS s SET acts = s.acts + 1
    WHERE s.slot = v_parked.slot AND (s.destination = p_destination OR s.destination = ANY (destinations));
    SELECT k.* INTO v_parked FROM fencepost.parked AS k WHERE k.destination = p_destination AND k.seq = p_seq;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'the event is no longer parked', 'seq', 'it was published, moved or skipped meanwhile');
    END IF;
    IF verdict = 'moved' THEN
        DELETE FROM fencepost.parked AS k WHERE k.destination = p_destination AND k.seq = p_seq;
        INSERT INTO fencepost.parked AS k (destination, slot, tenant, ordering_key, seq, event_id, operation, type, version, epoch,
            digest, recorded_at, content_type, attributes, reference, payload, reason, detail, attempts, next_try_at, parked_at)
        SELECT t.destination, v_parked.slot, v_parked.tenant, v_parked.ordering_key, v_parked.seq, v_parked.event_id,
               v_parked.operation, v_parked.type, v_parked.version, v_parked.epoch, v_parked.digest, v_parked.recorded_at,
               v_parked.content_type, v_parked.attributes, v_parked.reference, v_parked.payload, v_parked.reason,
               v_parked.detail, v_parked.attempts, clock_timestamp(), v_parked.parked_at
        FROM unnest(destinations) AS t (destination)
        ON CONFLICT (destination, seq) DO UPDATE SET next_try_at = clock_timestamp();
        PERFORM fencepost._wake_key(v_parked);
    ELSE
        UPDATE fencepost.parked AS k SET next_try_at = clock_timestamp()
        WHERE k.destination = p_destination AND k.seq = p_seq;
    END IF;
    PERFORM fencepost._decide_parked('retry_parked', v_parked, p_actor, p_reason,
        CASE verdict WHEN 'moved' THEN 'moved to ' || array_to_string(destinations, ', ') ELSE verdict END);
END $$;

-- Gives a parked event up, on an operator's word: it is never published here. The next one of its key becomes due, and the
-- key flows again with its last one.
CREATE OR REPLACE FUNCTION fencepost.skip_parked(p_destination text, p_seq bigint, p_actor text, p_reason text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_parked fencepost.parked;
BEGIN
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    PERFORM fencepost._enter();
    UPDATE fencepost.slot AS s SET acts = s.acts + 1
    WHERE s.destination = p_destination
      AND s.slot = (SELECT k.slot FROM fencepost.parked AS k WHERE k.destination = p_destination AND k.seq = p_seq);
    DELETE FROM fencepost.parked AS k WHERE k.destination = p_destination AND k.seq = p_seq RETURNING k.* INTO v_parked;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'there is no such parked event', 'seq', 'see: fencepost parked list');
    END IF;
    PERFORM fencepost._wake_key(v_parked);
    PERFORM fencepost._decide_parked('skip_parked', v_parked, p_actor, p_reason, 'skipped');
END $$;

-- What now comes first of a key may be tried.
CREATE OR REPLACE FUNCTION fencepost._wake_key(p_parked fencepost.parked)
RETURNS void LANGUAGE sql AS $$
    UPDATE fencepost.parked AS k SET next_try_at = clock_timestamp()
    WHERE k.destination = p_parked.destination AND k.destination <> '-' AND k.slot = p_parked.slot
      AND k.tenant = p_parked.tenant AND k.ordering_key = p_parked.ordering_key
      AND k.seq = (SELECT min(f.seq) FROM fencepost.parked AS f
                   WHERE f.destination = p_parked.destination AND f.slot = p_parked.slot AND f.tenant = p_parked.tenant
                     AND f.ordering_key = p_parked.ordering_key)
$$;

CREATE OR REPLACE FUNCTION fencepost._decide_parked(
    p_kind text, p_parked fencepost.parked, p_actor text, p_reason text, p_verdict text)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, tenant, operation, subject, verdict, evidence_ref)
    VALUES (gen_random_uuid(), p_kind, p_actor, p_reason, p_parked.tenant, p_parked.operation, p_parked.event_id::text, p_verdict,
            format('%s/%s %s.v%s %s', p_parked.destination, p_parked.seq, p_parked.type, p_parked.version, p_parked.reason))
$$;


-- relay/recycle.sql
-- Where every slot stands at every destination, as recorded: its newest ack, else the tick the destination started at.
CREATE OR REPLACE FUNCTION fencepost._progress()
RETURNS TABLE (destination text, slot integer, era integer, acked_tick bigint)
LANGUAGE sql STABLE AS $$
    SELECT s.destination, s.slot, coalesce(a.era, d.start_era), coalesce(a.acked_tick, d.start_tick)
    FROM fencepost.slot AS s
    JOIN fencepost.destination AS d ON d.destination = s.destination
    LEFT JOIN LATERAL (SELECT k.era, k.acked_tick FROM fencepost.ack AS k
                       WHERE k.destination = s.destination AND k.slot = s.slot ORDER BY k.n DESC LIMIT 1) AS a ON true
$$;

-- Whether a child of the outbox holds a row, committed as far as this statement sees.
CREATE OR REPLACE FUNCTION fencepost._has_events(p_child smallint)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM fencepost.outbox AS o WHERE o.child = p_child)
$$;

-- Why a child of the outbox is still needed; null when every row is acked everywhere and the retention is over.
-- With `p_since`, rows that this snapshot sees were proved to be acked before, at the same destinations.
CREATE OR REPLACE FUNCTION fencepost._needed(p_child smallint, p_since pg_snapshot DEFAULT NULL)
RETURNS text LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    v_installation fencepost.installation;
    v_child fencepost.outbox_child;
    v_kept_from timestamptz;
    v_open xid8[] := ARRAY(SELECT pg_snapshot_xip(p_since));
    v_unseen boolean;
    v record;
BEGIN
    SELECT * INTO STRICT v_installation FROM fencepost.installation;
    SELECT * INTO STRICT v_child FROM fencepost.outbox_child AS c WHERE c.child = p_child;
    v_kept_from := clock_timestamp() - v_installation.retention;
    IF v_child.closed_at > v_kept_from OR EXISTS (
        SELECT FROM generate_series(0, v_installation.slots - 1) AS s
        CROSS JOIN LATERAL (SELECT FROM fencepost.outbox AS o
                            WHERE o.child = p_child AND o.slot = s AND o.seq > v_child.closed_seq
                              AND o.recorded_at > v_kept_from LIMIT 1) AS late) THEN
        RETURN 'its retention is not over';
    ELSIF NOT EXISTS (SELECT FROM fencepost.destination AS d WHERE d.destination <> '-') THEN
        RETURN 'no destination is registered yet';
    END IF;
    -- Invariant: a row below a snapshot's xmin is visible in it, so only the rest is looked at, by the index on xid.
    FOR v IN SELECT p.destination, p.era, p.slots, t.snap
             FROM (SELECT g.destination, g.era, g.acked_tick, array_agg(g.slot) AS slots
                   FROM fencepost._progress() AS g GROUP BY g.destination, g.era, g.acked_tick) AS p
             LEFT JOIN fencepost.tick AS t ON t.era = p.era AND t.n = p.acked_tick
             ORDER BY p.destination, p.acked_tick LOOP
        IF v.era <> v_installation.era THEN
            RETURN 'destination ' || v.destination || ' has not finished its era';
        ELSIF v.snap IS NULL THEN
            RETURN 'the acked tick of destination ' || v.destination || ' is missing';
        ELSIF p_since IS NULL THEN
            v_unseen := EXISTS (SELECT FROM fencepost.outbox AS o
                                WHERE o.child = p_child AND o.xid >= pg_snapshot_xmin(v.snap) AND (o.slot + 0) = ANY (v.slots)
                                  AND NOT pg_visible_in_snapshot(o.xid, v.snap));
        ELSE
            v_unseen := EXISTS (SELECT FROM fencepost.outbox AS o
                                WHERE o.child = p_child AND (o.xid = ANY (v_open) OR o.xid >= pg_snapshot_xmax(p_since))
                                  AND (o.slot + 0) = ANY (v.slots) AND NOT pg_visible_in_snapshot(o.xid, v.snap));
        END IF;
        IF v_unseen THEN
            RETURN 'destination ' || v.destination || ' has not acked it';
        END IF;
    END LOOP;
    RETURN NULL;
END $$;

-- Who holds a table: sessions by their process ids, prepared transactions by their names.
CREATE OR REPLACE FUNCTION fencepost._holders(p_tables regclass[])
RETURNS text LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(string_agg(DISTINCT coalesce('prepared transaction ' || p.gid, 'session ' || l.pid), ', '), 'nobody any more')
    FROM pg_locks AS l
    -- A prepared transaction has no process; the lock on its own id tells which one it is.
    LEFT JOIN pg_locks AS x ON l.pid IS NULL AND x.pid IS NULL AND x.locktype = 'transactionid'
                               AND x.virtualtransaction = l.virtualtransaction
    LEFT JOIN pg_prepared_xacts AS p ON p.transaction = x.transactionid
    WHERE l.locktype = 'relation' AND l.relation = ANY (p_tables) AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
      AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
$$;

-- One step of recycling the outbox: truncates a child that nothing needs any more, or else opens the next child when it
-- is empty and the current one is old enough. Outcome: recycled, opened, kept, locked (detail: why, or by whom) or idle.
-- Locks: recycled EXCLUSIVE, destination SHARE, then the child ACCESS EXCLUSIVE, waiting at most `p_patience`; enqueue into the current child never waits for it.
CREATE OR REPLACE FUNCTION fencepost.recycle_outbox(
    p_min_age interval DEFAULT '1 minute', p_patience interval DEFAULT '200 ms',
    OUT outcome text, OUT child smallint, OUT detail text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_installation fencepost.installation;
    v_child smallint;
    v_table text;
    v_why text;
    v_since pg_snapshot;
    v_destinations text[];
    v_timeout text := current_setting('lock_timeout');
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM fencepost._refuse('ZF004', 'recycling needs READ COMMITTED', 'isolation', 'use a read committed transaction');
    END IF;
    PERFORM fencepost._enter();
    PERFORM set_config('lock_timeout', greatest(1, (extract(epoch FROM p_patience) * 1000)::integer)::text, true);
    outcome := 'idle';
    detail := '';
    BEGIN
        -- Two at once would both read the child and then both want it for themselves.
        LOCK TABLE fencepost.recycled IN EXCLUSIVE MODE;
    EXCEPTION WHEN lock_not_available THEN
        detail := 'another step of recycling is under way';
        PERFORM set_config('lock_timeout', v_timeout, true);
        RETURN;
    END;
    SELECT * INTO STRICT v_installation FROM fencepost.installation;
    -- The next child is the oldest.
    FOREACH v_child IN ARRAY ARRAY[(v_installation.outbox_child + 1) % 3, (v_installation.outbox_child + 2) % 3]::smallint[] LOOP
        CONTINUE WHEN NOT fencepost._has_events(v_child);
        v_table := 'fencepost.outbox_' || v_child;
        -- Invariant: the snapshot is older than the proof, so that what it sees was looked at.
        SELECT pg_current_snapshot(), ARRAY(SELECT d.destination FROM fencepost.destination AS d ORDER BY 1)
        INTO v_since, v_destinations;
        v_why := fencepost._needed(v_child);
        IF v_why IS NULL THEN
            -- Locks: first the lock, then (in later statements) the proof: the row of a writer that is still open is
            -- invisible to a proof, and would go with the rest once it has committed.
            BEGIN
                -- A destination that is being registered may start at a tick whose page is in this child.
                LOCK TABLE fencepost.destination IN SHARE MODE;
                EXECUTE 'LOCK TABLE ' || v_table || ' IN ACCESS EXCLUSIVE MODE';
            EXCEPTION WHEN lock_not_available THEN
                outcome := 'locked';
                child := v_child;
                detail := 'held by ' || fencepost._holders(ARRAY['fencepost.destination', v_table]::regclass[]);
                EXIT;
            END;
            -- Only what came meanwhile is looked at while everybody waits; a new destination may need the rest too.
            IF v_destinations <> ARRAY(SELECT d.destination FROM fencepost.destination AS d ORDER BY 1) THEN
                v_since := NULL;
            END IF;
            v_why := fencepost._needed(v_child, v_since);
            IF v_why IS NULL THEN
                PERFORM fencepost._note_recycled(v_child);
                -- Crash here: [Y2] what is noted as gone goes with this commit, or neither happened.
                EXECUTE 'TRUNCATE ' || v_table;
                outcome := 'recycled';
                child := v_child;
                EXIT;
            END IF;
        END IF;
        IF outcome = 'idle' THEN
            outcome := 'kept';
            child := v_child;
            detail := v_why;
        END IF;
    END LOOP;
    IF outcome <> 'recycled' AND fencepost._open_child(v_installation.outbox_child, p_min_age) THEN
        outcome := 'opened';
        child := (v_installation.outbox_child + 1) % 3;
        detail := '';
    END IF;
    PERFORM set_config('lock_timeout', v_timeout, true);
END $$;

-- Remembers what is about to go, so that nobody takes the rest for everything.
CREATE OR REPLACE FUNCTION fencepost._note_recycled(p_child smallint)
RETURNS void LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_child fencepost.outbox_child;
    v_seq bigint;
    v_recorded timestamptz;
BEGIN
    SELECT * INTO STRICT v_child FROM fencepost.outbox_child AS c WHERE c.child = p_child;
    SELECT max(o.seq), max(o.recorded_at) FILTER (WHERE o.seq > v_child.closed_seq) INTO v_seq, v_recorded
    FROM fencepost.installation AS i, generate_series(0, i.slots - 1) AS s
    CROSS JOIN LATERAL (
        (SELECT l.seq, l.recorded_at FROM fencepost.outbox AS l
         WHERE l.child = p_child AND l.slot = s AND l.seq > v_child.closed_seq)
        UNION ALL
        (SELECT n.seq, n.recorded_at FROM fencepost.outbox AS n
         WHERE n.child = p_child AND n.slot = s ORDER BY n.seq DESC LIMIT 1)) AS o;
    UPDATE fencepost.recycled AS r
    SET seq = greatest(r.seq, v_seq), recorded_at = greatest(r.recorded_at, v_child.closed_at, v_recorded),
        era = p.era, tick = CASE WHEN r.era = p.era THEN greatest(r.tick, p.tick) ELSE p.tick END
    FROM (SELECT max(e.era) AS era, max(e.tick) AS tick
          FROM (SELECT max(g.era) AS era, min(g.acked_tick) AS tick FROM fencepost._progress() AS g GROUP BY g.slot) AS e) AS p;
END $$;

-- Opens the next child if it is empty and the current one holds events for long enough: half the retention, so that
-- three children keep at most one and a half times what was asked for.
CREATE OR REPLACE FUNCTION fencepost._open_child(p_current smallint, p_min_age interval)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_next smallint := (p_current + 1) % 3;
    v_seq bigint;
BEGIN
    IF fencepost._has_events(v_next) OR NOT fencepost._has_events(p_current) OR NOT EXISTS (
        SELECT FROM fencepost.installation AS i, fencepost.outbox_child AS c
        WHERE c.child = p_current AND c.opened_at + greatest(i.retention / 2, p_min_age) <= clock_timestamp()) THEN
        RETURN false;
    END IF;
    BEGIN
        UPDATE fencepost.installation SET outbox_child = v_next WHERE outbox_child = p_current;
    EXCEPTION WHEN lock_not_available THEN
        RETURN false;
    END;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    -- Invariant: the number is read before the time, so that every number up to it was drawn before closed_at.
    SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END INTO v_seq FROM fencepost.outbox_seq AS s;
    UPDATE fencepost.outbox_child AS c SET closed_seq = v_seq, closed_at = clock_timestamp() WHERE c.child = p_current;
    UPDATE fencepost.outbox_child AS c SET opened_at = clock_timestamp() WHERE c.child = v_next;
    RETURN true;
END $$;

-- Once the acks have grown beyond `p_bytes`, keeps the newest of each slot in the other child and truncates this one.
-- Locks: recycled EXCLUSIVE, slot EXCLUSIVE, so that no ack and no lease is under way, waiting at most `p_patience`.
CREATE OR REPLACE FUNCTION fencepost.recycle_acks(
    p_bytes bigint DEFAULT 4194304, p_patience interval DEFAULT '200 ms', OUT outcome text, OUT detail text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_child smallint;
    v_other smallint;
    v_table text;
    v_timeout text := current_setting('lock_timeout');
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM fencepost._refuse('ZF004', 'recycling needs READ COMMITTED', 'isolation', 'use a read committed transaction');
    END IF;
    PERFORM fencepost._enter();
    SELECT i.ack_child, 1 - i.ack_child INTO STRICT v_child, v_other FROM fencepost.installation AS i;
    v_table := 'fencepost.ack_' || v_child;
    outcome := 'idle';
    detail := '';
    IF pg_relation_size(v_table::regclass) < p_bytes THEN
        RETURN;
    END IF;
    PERFORM set_config('lock_timeout', greatest(1, (extract(epoch FROM p_patience) * 1000)::integer)::text, true);
    BEGIN
        LOCK TABLE fencepost.recycled, fencepost.slot IN EXCLUSIVE MODE;
        EXECUTE 'LOCK TABLE ' || v_table || ' IN ACCESS EXCLUSIVE MODE';
        UPDATE fencepost.installation SET ack_child = v_other WHERE ack_child = v_child;
    EXCEPTION WHEN lock_not_available THEN
        outcome := 'locked';
        detail := 'held by ' || fencepost._holders(ARRAY['fencepost.recycled', 'fencepost.slot', v_table]::regclass[]);
        PERFORM set_config('lock_timeout', v_timeout, true);
        RETURN;
    END;
    IF FOUND THEN
        INSERT INTO fencepost.ack (child, destination, slot, n, era, acked_tick, end_tick, position, generation, at)
        SELECT v_other, a.destination, a.slot, a.n, a.era, a.acked_tick, a.end_tick, a.position, a.generation, a.at
        FROM fencepost.slot AS s
        CROSS JOIN LATERAL (SELECT k.* FROM fencepost.ack AS k
                            WHERE k.destination = s.destination AND k.slot = s.slot ORDER BY k.n DESC LIMIT 1) AS a
        WHERE a.child = v_child;
        -- Crash here: [Y3] the newest acks are moved with this commit, or neither happened.
        EXECUTE 'TRUNCATE ' || v_table;
        outcome := 'recycled';
    END IF;
    PERFORM set_config('lock_timeout', v_timeout, true);
END $$;

-- Deletes ticks that no slot needs any more, at most `p_batch`, above `p_after`; returns where to go on.
-- Dead rows of earlier calls lie below `p_after` and are not walked over again, whatever snapshot is pinned.
CREATE OR REPLACE FUNCTION fencepost.purge_ticks(p_after bigint, p_batch integer, OUT purged integer, OUT after bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
SET lock_timeout = '200ms' AS $$
DECLARE
    v_era integer;
    v_needed bigint;
    v_last bigint;
BEGIN
    PERFORM fencepost._enter();
    after := p_after;
    purged := 0;
    BEGIN
        LOCK TABLE fencepost.recycled IN EXCLUSIVE MODE;
        -- A destination that is being registered may start at an old tick.
        LOCK TABLE fencepost.destination IN SHARE MODE;
    EXCEPTION WHEN lock_not_available THEN
        RETURN;
    END;
    SELECT t.era INTO STRICT v_era FROM fencepost.tick AS t ORDER BY t.era DESC, t.n DESC LIMIT 1;
    -- Both ticks of a page that is under way, recorded or not, are at or above the acked one.
    SELECT min(p.acked_tick) INTO v_needed FROM fencepost._progress() AS p
    HAVING bool_and(p.era = v_era);
    IF v_needed IS NULL THEN
        RETURN;
    END IF;
    SELECT max(b.n) INTO v_last
    FROM (SELECT t.n FROM fencepost.tick AS t WHERE t.era = v_era AND t.n > p_after AND t.n < v_needed ORDER BY t.n LIMIT p_batch) AS b;
    IF v_last IS NOT NULL THEN
        -- Crash here: [Y4] the batch goes with this commit; the next holder of the duty begins from the oldest tick.
        DELETE FROM fencepost.tick AS t WHERE t.era = v_era AND t.n > p_after AND t.n <= v_last;
        GET DIAGNOSTICS purged = ROW_COUNT;
        after := v_last;
    END IF;
END $$;

-- Forgets identities of events whose replay window is over, at most `p_batch`, recorded at `p_after` or later; returns
-- where to go on. Kept as long as the event itself is in the outbox or parked.
CREATE OR REPLACE FUNCTION fencepost.purge_event_keys(
    p_after timestamptz, p_batch integer, OUT purged integer, OUT after timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
BEGIN
    PERFORM fencepost._enter();
    WITH looked AS (
        SELECT k.ctid AS place, k.recorded_at,
               EXISTS (SELECT FROM fencepost.parked AS p WHERE p.event_id = k.event_id) AS is_parked
        FROM fencepost.event_key AS k
        -- An event may have been recorded a moment before the child it chose was opened.
        WHERE k.recorded_at >= p_after AND k.recorded_at < (
            SELECT least(clock_timestamp() - i.replay_window,
                         (SELECT min(c.opened_at) - interval '1 minute' FROM fencepost.outbox_child AS c
                          WHERE fencepost._has_events(c.child)))
            FROM fencepost.installation AS i)
        ORDER BY k.recorded_at LIMIT p_batch FOR UPDATE OF k SKIP LOCKED),
    gone AS (
        DELETE FROM fencepost.event_key AS k
        WHERE k.ctid = ANY (ARRAY(SELECT l.place FROM looked AS l WHERE NOT l.is_parked)) RETURNING 1)
    SELECT (SELECT count(*) FROM gone), coalesce((SELECT max(l.recorded_at) FROM looked AS l), p_after) INTO purged, after;
END $$;

-- Declares how long events stay in the outbox and how long operations are remembered; nulls leave a value as it is.
CREATE OR REPLACE FUNCTION fencepost.set_retention(
    p_retention interval, p_replay_window interval, p_actor text, p_reason text,
    OUT retention interval, OUT replay_window interval)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM fencepost._enter();
    PERFORM fencepost._require_identity('actor', p_actor);
    PERFORM fencepost._require_identity('reason', p_reason);
    SELECT coalesce(p_retention, i.retention), coalesce(p_replay_window, i.replay_window) INTO STRICT retention, replay_window
    FROM fencepost.installation AS i FOR NO KEY UPDATE;
    IF retention NOT BETWEEN interval '0' AND interval '10 years' THEN
        PERFORM fencepost._refuse('ZF003', 'retention is not between nothing and ten years', 'retention', NULL);
    ELSIF replay_window NOT BETWEEN retention AND interval '10 years' THEN
        PERFORM fencepost._refuse('ZF003', 'the replay window is shorter than the retention, or longer than ten years', 'replay_window',
            'an event that can still be sent again must still be recognised');
    END IF;
    UPDATE fencepost.installation AS i SET retention = set_retention.retention, replay_window = set_retention.replay_window;
    INSERT INTO fencepost.decision (decision_id, kind, actor, reason, subject, verdict)
    VALUES (gen_random_uuid(), 'retention', p_actor, p_reason, 'outbox', retention::text || ', ' || replay_window::text);
END $$;


-- relay/routes.sql
-- Whether events of this type take a route: an exact type, a prefix that ends in `.*`, or `*`.
CREATE OR REPLACE FUNCTION fencepost._matches(p_match text, p_type text)
RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT p_match = '*' OR p_match = p_type OR (p_match LIKE '%.*' AND starts_with(p_type, left(p_match, -1)))
$$;

-- From this number on a destination answers for these matches and no others; what came before stays its business.
-- Locks: no tick is taken while routes change, so whoever reads the routes after a page's end tick knows every change
-- that concerns a row of that page.
CREATE OR REPLACE FUNCTION fencepost._span_routes(p_destination text, p_matches text[], p_early boolean)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_bound bigint := 0;
BEGIN
    LOCK TABLE fencepost.tick_gate IN EXCLUSIVE MODE;
    IF NOT p_early THEN
        SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END INTO v_bound FROM fencepost.outbox_seq AS s;
    END IF;
    DELETE FROM fencepost.route AS r
    WHERE r.destination = p_destination AND r.until IS NULL AND r.since = v_bound AND r.match <> ALL (p_matches);
    UPDATE fencepost.route AS r SET until = v_bound
    WHERE r.destination = p_destination AND r.until IS NULL AND r.match <> ALL (p_matches);
    INSERT INTO fencepost.route (destination, match, since)
    SELECT DISTINCT p_destination, m, v_bound FROM unnest(p_matches) AS m
    WHERE NOT EXISTS (SELECT FROM fencepost.route AS r
                      WHERE r.destination = p_destination AND r.match = m AND r.until IS NULL);
END $$;

-- How many committed events of a destination are its business and not acked; counting stops at the limit.
CREATE OR REPLACE FUNCTION fencepost._unsent(p_destination text, p_limit bigint)
RETURNS bigint LANGUAGE sql AS $$
    SELECT count(*) FROM (
        SELECT FROM fencepost.slot AS s
        JOIN fencepost.destination AS d ON d.destination = s.destination
        LEFT JOIN LATERAL (SELECT k.era, k.acked_tick, k.end_tick, k.position FROM fencepost.ack AS k
                           WHERE k.destination = s.destination AND k.slot = s.slot ORDER BY k.n DESC LIMIT 1) AS a ON true
        JOIN fencepost.tick AS t ON t.era = coalesce(a.era, d.start_era) AND t.n = coalesce(a.acked_tick, d.start_tick)
        JOIN fencepost.tick AS e ON e.era = coalesce(a.era, d.start_era) AND e.n = coalesce(a.end_tick, d.start_tick)
        CROSS JOIN LATERAL (
            SELECT m.seq, m.type, m.xid FROM fencepost.outbox AS m WHERE m.slot = s.slot AND m.seq > t.hint
            UNION ALL
            SELECT l.seq, l.type, l.xid FROM fencepost.outbox AS l
            WHERE l.slot = s.slot AND l.seq <= t.hint
              AND (l.xid = ANY (t.snap_xip) OR l.xid >= t.snap_xmax AND l.xid < t.next)) AS o
        WHERE s.destination = p_destination
          AND NOT (o.seq <= coalesce(a.position, 0) AND pg_visible_in_snapshot(o.xid, e.snap))
          AND EXISTS (SELECT FROM fencepost.route AS r
                      WHERE r.destination = p_destination AND fencepost._matches(r.match, o.type)
                        AND o.seq > r.since AND (r.until IS NULL OR o.seq <= r.until))
        LIMIT p_limit) AS w
$$;


-- relay/slots.sql
-- Renews this relay's lease on all its slots of a destination and takes free ones up to its fair share.
-- Returns every slot it owns, with the progress to continue from; `surplus` ones should be drained and released.
-- Locks: the destination row, so that leases of one destination are decided one after the other.
CREATE OR REPLACE FUNCTION fencepost.lease_slots(p_destination text, p_owner uuid, p_lease interval)
RETURNS TABLE (slot integer, generation bigint, era integer, acked_tick bigint, end_tick bigint, "position" bigint, surplus boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_share bigint;
    v_owned bigint;
BEGIN
    PERFORM fencepost._enter();
    IF p_lease IS NULL OR p_lease NOT BETWEEN interval '1 second' AND interval '10 minutes' THEN
        PERFORM fencepost._refuse('ZF003', 'lease is not between 1 second and 10 minutes', 'lease', NULL);
    END IF;
    PERFORM FROM fencepost.destination AS d WHERE d.destination = p_destination FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM fencepost._refuse('ZF003', 'the destination is not registered', 'destination', 'register it first');
    END IF;
    DELETE FROM fencepost.relay AS r
    WHERE r.destination = p_destination AND r.owner <> p_owner AND r.lease_until <= clock_timestamp();
    INSERT INTO fencepost.relay AS r (destination, owner, lease_until)
    VALUES (p_destination, p_owner, clock_timestamp() + p_lease)
    ON CONFLICT ON CONSTRAINT relay_pkey DO UPDATE SET lease_until = clock_timestamp() + p_lease;

    -- Shares differ by one slot at most and add up to all slots, so that no relay stays without one.
    SELECT i.slots / r.live + CASE WHEN r.rank <= i.slots % r.live THEN 1 ELSE 0 END
    INTO v_share
    FROM fencepost.installation AS i,
         (SELECT count(*) AS live, count(*) FILTER (WHERE l.owner <= p_owner) AS rank
          FROM fencepost.relay AS l WHERE l.destination = p_destination) AS r;
    SELECT count(*) INTO v_owned FROM fencepost.slot AS s WHERE s.destination = p_destination AND s.owner = p_owner;
    IF v_owned < v_share THEN
        -- Crash here: [S3] until this commits the slots are free; after it others take them once the lease has run out.
        UPDATE fencepost.slot AS s SET owner = p_owner, generation = s.generation + 1
        FROM (SELECT f.slot FROM fencepost.slot AS f
              WHERE f.destination = p_destination
                AND (f.owner IS NULL OR NOT EXISTS (SELECT FROM fencepost.relay AS r
                                                    WHERE r.destination = p_destination AND r.owner = f.owner))
              ORDER BY f.slot LIMIT v_share - v_owned FOR NO KEY UPDATE) AS free
        WHERE s.destination = p_destination AND s.slot = free.slot;
    END IF;

    RETURN QUERY
    SELECT s.slot, s.generation, coalesce(a.era, d.start_era), coalesce(a.acked_tick, d.start_tick),
           coalesce(a.end_tick, d.start_tick), coalesce(a.position, 0),
           row_number() OVER (ORDER BY s.slot) > v_share
    FROM fencepost.slot AS s
    JOIN fencepost.destination AS d ON d.destination = s.destination
    LEFT JOIN LATERAL (SELECT k.era, k.acked_tick, k.end_tick, k.position FROM fencepost.ack AS k
                       WHERE k.destination = s.destination AND k.slot = s.slot ORDER BY k.n DESC LIMIT 1) AS a ON true
    WHERE s.destination = p_destination AND s.owner = p_owner
    ORDER BY s.slot;
END $$;

-- Gives slots back after their pages are acked; nobody waits for the lease to run out.
CREATE OR REPLACE FUNCTION fencepost.release_slots(p_destination text, p_owner uuid, p_slots integer[])
RETURNS integer LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count integer;
BEGIN
    PERFORM fencepost._enter();
    PERFORM FROM fencepost.destination AS d WHERE d.destination = p_destination FOR NO KEY UPDATE;
    -- Crash here: [S2] until this commits others wait for the end of the lease; after it the slots are free at once.
    UPDATE fencepost.slot AS s SET owner = NULL, generation = s.generation + 1
    WHERE s.destination = p_destination AND s.owner = p_owner AND s.slot = ANY (p_slots);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    DELETE FROM fencepost.relay AS r
    WHERE r.destination = p_destination AND r.owner = p_owner
      AND NOT EXISTS (SELECT FROM fencepost.slot AS s WHERE s.destination = p_destination AND s.owner = p_owner);
    RETURN v_count;
END $$;

-- Locks the slots and refuses (ZF040) unless all of them still belong to this owner under these generations.
CREATE OR REPLACE FUNCTION fencepost._require_slots(p_destination text, p_owner uuid, p_slots integer[], p_generations bigint[])
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_stale integer[];
BEGIN
    PERFORM FROM fencepost.slot AS s
    WHERE s.destination = p_destination AND s.slot = ANY (p_slots) ORDER BY s.slot FOR NO KEY UPDATE;
    SELECT array_agg(u.slot ORDER BY u.slot) INTO v_stale
    FROM unnest(p_slots, p_generations) AS u (slot, generation)
    WHERE NOT EXISTS (SELECT FROM fencepost.slot AS s
                      WHERE s.destination = p_destination AND s.slot = u.slot
                        AND s.owner = p_owner AND s.generation = u.generation);
    IF v_stale IS NOT NULL THEN
        PERFORM fencepost._refuse('ZF040', 'slots ' || array_to_string(v_stale, ', ') || ' were taken over', 'slot',
            'lease the slots again; their new owner sends what was not acked');
    END IF;
END $$;


-- relay/tick.sql
-- The newest tick, after taking a new one when events became visible since and the last is old enough.
-- A tick is a stored snapshot: all that it sees, and no tick before saw, is what the next pages send.
CREATE OR REPLACE FUNCTION fencepost.tick(
    p_min_interval interval DEFAULT '0',
    OUT era integer, OUT n bigint, OUT fresh boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_tick fencepost.tick;
    v_snap pg_snapshot;
    v_hint bigint;
    v_next xid8;
    v_locked boolean := false;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM fencepost._refuse('ZF004', 'tick needs READ COMMITTED', 'isolation', 'use a read committed transaction');
    END IF;
    PERFORM fencepost._enter();
    LOOP
        SELECT t.* INTO STRICT v_tick FROM fencepost.tick AS t ORDER BY t.era DESC, t.n DESC LIMIT 1;
        era := v_tick.era;
        n := v_tick.n;
        fresh := false;
        -- A clock that was set back is no reason to wait for it to catch up.
        IF clock_timestamp() BETWEEN v_tick.taken_at AND v_tick.taken_at + p_min_interval THEN
            RETURN;
        END IF;
        -- The sequence moved, or a transaction that was open at the last tick has committed an event since.
        IF (SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END FROM fencepost.outbox_seq AS s) = v_tick.hint
           AND NOT EXISTS (SELECT FROM fencepost.outbox AS o WHERE o.xid = ANY (v_tick.snap_xip) AND o.seq <= v_tick.hint)
           AND NOT EXISTS (SELECT FROM fencepost.outbox AS o
                           WHERE o.xid >= v_tick.snap_xmax AND o.xid < v_tick.next AND o.seq <= v_tick.hint) THEN
            RETURN;
        END IF;
        EXIT WHEN v_locked;
        -- Locks: first the lock, then (in a later statement) the snapshot; the other order sends a row twice.
        LOCK TABLE fencepost.tick_gate IN EXCLUSIVE MODE;
        v_locked := true;
    END LOOP;

    PERFORM set_config('synchronous_commit', 'on', true);
    SELECT pg_current_snapshot() INTO v_snap;
    SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END INTO v_hint FROM fencepost.outbox_seq AS s;
    SELECT pg_current_xact_id() INTO v_next;
    n := v_tick.n + 1;
    fresh := true;
    -- Crash here: [T] a tick that does not commit was never seen; no page ends at it.
    INSERT INTO fencepost.tick (era, n, snap, hint, next, snap_xmax, snap_xip)
    VALUES (era, n, v_snap, v_hint, v_next, pg_snapshot_xmax(v_snap), ARRAY(SELECT pg_snapshot_xip(v_snap)));
END $$;


REVOKE ALL ON ALL ROUTINES IN SCHEMA fencepost FROM PUBLIC;
