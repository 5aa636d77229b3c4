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
