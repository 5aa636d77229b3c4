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
