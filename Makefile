# Every target makes the environment by itself: each is the only command you need to type.
PYTHON  ?= python3
VENV    := .venv
PY      := $(VENV)/bin/python
STAMP   := $(VENV)/.installed
BROKER  ?= embedded
BENCH   ?=
MUTATE  ?=
CONTRACT ?=
DRILL   ?=
WORKERS ?= auto
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: help demo test check contract model mutate-guards bench fuzz-order bench-doorbell bench-relay bench-consumer bench-jobs bench-rotation bench-replay soak-consumer chaos soak restore-drill stack-up stack-down services
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

demo: $(STAMP) ## the main job before your eyes (BROKER=embedded|kafka|rabbitmq)
	@case "$(BROKER)" in embedded) ;; *) compose/install ;; esac
	$(PY) examples/reports/demo.py --broker $(BROKER)

test: $(STAMP) services ## every test on real PostgreSQL 18 and 15, PgBouncer, RabbitMQ, Kafka and S3Proxy (WORKERS=0: in one process)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal

check: $(STAMP) ## linters, both type checkers, import contracts, layout
	ruff check
	ruff format --check
	mypy
	pyright
	lint-imports
	$(PY) -m pytest tests/test_layout.py -q

contract: $(STAMP) services ## record what callers see of the SQL; refuses what would break them (CONTRACT=--unreleased)
	PYTHONPATH=tests:compose $(PY) -m support.sql_contract $(CONTRACT)

mutate-guards: $(STAMP) services ## each guard of the SQL removed in turn: which test notices (MUTATE="--only fence")
	PYTHONPATH=tests $(PY) -m mutation $(MUTATE)

model: $(STAMP) ## explore the state machine of jobs: states, invariants, a counterexample for each guard removed
	PYTHONPATH=tests $(PY) -m model

fuzz-order: $(STAMP) ## two sessions, two relays, late commits: nothing lost, nothing out of order
	$(PY) bench/fuzz_order.py

bench: bench-relay bench-replay bench-consumer bench-jobs bench-rotation ## every benchmark

bench-doorbell: $(STAMP) services ## what the doorbell costs the writers
	$(PY) bench/doorbell.py $(BENCH)

bench-relay: $(STAMP) services ## the relay beside the limits of this machine, bounds checked (BENCH="--full --peers")
	$(PY) bench/relay/run.py --gate $(BENCH)

bench-consumer: $(STAMP) services ## handlers with and without the inbox, single and in batches, bounds checked
	$(PY) bench/consumer/run.py --gate $(BENCH)

bench-jobs: $(STAMP) services ## jobs beside bare SQL, PgQueuer and Procrastinate, bounds checked (BENCH="--only pinned")
	$(PY) bench/jobs/run.py --gate $(BENCH)

bench-rotation: $(STAMP) services ## rotations while eight workers publish 100,000 jobs, and the price of the check of authority, bounds checked
	$(PY) bench/rotation/run.py $(BENCH)

soak-consumer: $(STAMP) services ## two consumers under kills and redeliveries: each operation once (BENCH="--seed 1")
	$(PY) bench/soak_consumer.py $(BENCH)

chaos: $(STAMP) services ## 5,000 jobs under kills, stops, restarts and lost replies: wrong answers counted, PgQueuer's beside (BENCH="--seed 1")
	$(PY) bench/chaos/run.py $(BENCH)

soak: $(STAMP) services ## the same for ten minutes at a steady rate, ages bounded (BENCH="--seconds 3600")
	$(PY) bench/chaos/run.py --soak $(BENCH)

restore-drill: $(STAMP) services ## five kinds of restore, from the copy to publishing again, then without each guard (DRILL="--kind standby")
	$(PY) bench/restore_drill/run.py $(DRILL)

bench-replay: $(STAMP) services ## a topic becomes a projection, killed once, bounds checked (BENCH="--count 100000")
	$(PY) bench/replay.py $(BENCH)

stack-up: $(STAMP) services ## start all services and leave them running; tests use them
	PYTHONPATH=compose $(PY) -m stack up

stack-down: $(STAMP) ## end what stack-up has started
	PYTHONPATH=compose $(PY) -m stack down

services:
	@compose/install

$(STAMP): pyproject.toml
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@
