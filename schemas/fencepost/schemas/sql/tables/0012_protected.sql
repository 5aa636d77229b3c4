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
