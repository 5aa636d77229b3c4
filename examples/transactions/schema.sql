CREATE TABLE submissions (id text PRIMARY KEY, state text NOT NULL);
CREATE TABLE analyses (submission_id text PRIMARY KEY);
