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
