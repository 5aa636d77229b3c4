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
