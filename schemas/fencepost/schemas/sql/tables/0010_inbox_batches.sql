-- Inbox: batches of reservations whose transaction has still to say which of them were handled.

-- Invariant: no row is ever committed; a commit that would leave one is refused.
CREATE TABLE fencepost.inbox_batch (
    transaction xid8 PRIMARY KEY,
    consumer    text NOT NULL,
    reserved    text[] NOT NULL,
    counted     text[] NOT NULL
);
COMMENT ON COLUMN fencepost.inbox_batch.reserved IS 'Coordinates of what was reserved here; counted: of what was known and has arrived again.';
