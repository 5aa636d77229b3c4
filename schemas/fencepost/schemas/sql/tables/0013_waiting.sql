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
