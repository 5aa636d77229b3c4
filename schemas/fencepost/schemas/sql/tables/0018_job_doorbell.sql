-- The doorbell of jobs: until when (microseconds since 1970) some worker sleeps and wants to be rung; nothing or the past: nobody.
-- Invariant: a sequence, since its value is seen at once and by every snapshot, also one taken before the worker fell asleep.
CREATE SEQUENCE fencepost.job_doorbell MINVALUE 0 START WITH 0;
