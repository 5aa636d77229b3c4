-- The doorbell: until when (microseconds since 1970) some relay sleeps and wants to be rung; nothing or the past: nobody.
-- Invariant: a sequence, since its value is seen at once and by every snapshot, also one taken before the relay fell asleep.
CREATE SEQUENCE fencepost.doorbell MINVALUE 0 START WITH 0;
