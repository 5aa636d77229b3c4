CREATE TABLE submissions (id text PRIMARY KEY, state text NOT NULL DEFAULT 'received');
CREATE TABLE analyses (submission_id text PRIMARY KEY);
CREATE TABLE reports (submission_id text PRIMARY KEY, body text NOT NULL, receipt text NOT NULL);
INSERT INTO submissions (id) VALUES ('report-1');
