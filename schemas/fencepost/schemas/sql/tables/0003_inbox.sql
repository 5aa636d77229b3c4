-- Reservation: one committed handling per tenant, consumer, operation and type; deliveries are kept apart from it.

CREATE TABLE fencepost.reservation (
    tenant      text NOT NULL,
    consumer    text NOT NULL,
    operation   text NOT NULL,
    type        text NOT NULL,
    version     integer NOT NULL,
    event_id    uuid NOT NULL,
    source      text NOT NULL,
    epoch       bigint NOT NULL,
    meaning     bytea NOT NULL CHECK (octet_length(meaning) = 33),
    event_time  timestamptz NOT NULL,
    coordinates text NOT NULL,
    reserved_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, consumer, operation, type)
);

-- A delivery is unique within its broker: coordinates are a JSON array that names broker, place and message.
CREATE TABLE fencepost.delivery (
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
    unreserved  boolean NOT NULL DEFAULT false,
    PRIMARY KEY (consumer, coordinates)
);
COMMENT ON COLUMN fencepost.delivery.unreserved IS
  'No reservation was made with it, as with a copy: it is forgotten by its own time; any other goes with its reservation.';

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
