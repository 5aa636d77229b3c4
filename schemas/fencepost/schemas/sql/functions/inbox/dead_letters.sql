-- Dead letters as they may be looked at: everything but headers and payload.
CREATE OR REPLACE VIEW fencepost.dead_letters AS
    SELECT d.id, d.consumer, d.reason, d.field, d.detail, d.tenant, d.operation, d.type, d.version, d.event_id, d.attempts,
           d.coordinates, 'sha256-v1:' || encode(substr(d.stored_meaning, 2), 'hex') AS stored_meaning,
           'sha256-v1:' || encode(substr(d.arrived_meaning, 2), 'hex') AS arrived_meaning,
           'sha256:' || encode(d.content, 'hex') AS content, octet_length(d.payload) AS bytes, d.created_at, d.last_at,
           d.due_at, d.takes, d.unhandled, d.released_epoch
    FROM fencepost.dead_letter AS d;
