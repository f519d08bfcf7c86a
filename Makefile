# `make quickstart` and `make test` need nothing but Linux x86-64, Python 3.11 or newer, and make.
# ARGS are handed on: make quickstart ARGS="seed=2 logging.save_dir=runs/seed2", make test ARGS="-k rewards".

PYTHON_IN_VENV := .venv/bin/python
SHELL := bash
.SHELLFLAGS := -o pipefail -c
with_prefix = (trap "" INT; exec sed -u "s/^/$(1) | /")
# The two streams of tests are printed through one another; what failed stands at the end once more, in at most 30 lines.
failed_tests = echo; echo "failed (whole output: .venv/test-engines.log, .venv/test-others.log):"; \
               grep -hE "^(FAILED|ERROR) |^=+ .* in [0-9.]+s" .venv/test-engines.log .venv/test-others.log | cut -c1-300 | tail -n 30

.PHONY: help setup doctor quickstart quickstart-models small-tutor small-tutor-models small-tutor-controls marooned marooned-models test \
        test-engines test-others test-full chaos lint house bench docs gpu-check openenv-check release

help:
	@echo 'make doctor             looks this machine over: what is missing, and what to do about it'
	@echo 'make quickstart         a tutor that learns on this machine, in minutes; ends with runs/quickstart/report.html'
	@echo 'make quickstart-models  only the models that the quickstart starts from'
	@echo 'make small-tutor        a real chat model of 135 million parameters learns to teach, in half an hour on two cores'
	@echo 'make small-tutor-models  only the model that it starts from'
	@echo 'make small-tutor-controls  the same without learning, and with shuffled rewards: neither may get better'
	@echo 'make marooned           a sailor that learns the island game on this machine, with a supervisor of rules'
	@echo 'make marooned-models    only the model that it starts from'
	@echo 'make test               the tests'
	@echo 'make test-full          the long and the rarely needed ones, too'
	@echo 'make chaos              what a run survives: a misbehaving API, kills, full disks, a cut network, a soak, odd requests; in parts: make chaos ARGS="--shard 1/4"'
	@echo 'make lint               ruff and mypy'
	@echo 'make house              how large the code, the tests and the docs are, beside their aims'
	@echo 'make bench              two of the benchmarks; docs/measured.md has the commands of all'
	@echo 'make gpu-check          on a GPU: its tests, three quickstart steps, whole steps of models of real size'
	@echo 'make docs               the pages of docs/ that are made from the sources; checks the lesson plans'
	@echo 'make openenv-check      Marooned as an OpenEnv server: its validator and its test, in an environment of their own'
	@echo 'make release            sdist and wheel in dist/, checked; the wheel is tried in an empty environment'
	@echo 'make setup              .venv with the pinned requirements; most targets above do it when needed'

setup:
	@bash src/classroom_rl/launch/install.sh

# Sets nothing up: it works before anything is installed.
doctor:
	@if [ -x $(PYTHON_IN_VENV) ]; then $(PYTHON_IN_VENV) -m classroom_rl.launch.doctor; else PYTHONPATH=src $${PYTHON:-python3} -m classroom_rl.launch.doctor; fi

quickstart: setup
	@$(PYTHON_IN_VENV) -m classroom_rl.launch.quickstart $(ARGS)

quickstart-models: setup
	@$(PYTHON_IN_VENV) -m classroom_rl.launch.quickstart --models-only $(ARGS)

small-tutor: setup
	@$(PYTHON_IN_VENV) -m classroom_rl.launch.small_tutor $(ARGS)

small-tutor-models: setup
	@$(PYTHON_IN_VENV) -m classroom_rl.launch.small_tutor --models-only $(ARGS)

small-tutor-controls: setup
	@$(PYTHON_IN_VENV) -m classroom_rl.launch.controls small_tutor $(ARGS)

marooned: setup
	@$(PYTHON_IN_VENV) -m classroom_rl.launch.marooned $(ARGS)

marooned-models: setup
	@$(PYTHON_IN_VENV) -m classroom_rl.launch.marooned --models-only $(ARGS)

# Without ARGS, two processes share the tests: one takes those that start engines or trainings, one takes the others, with
# one thread, so that they do not wait for each other's cores.
test: setup
ifdef ARGS
	@$(PYTHON_IN_VENV) -m pytest -m "not full" $(ARGS)
else
	@$(MAKE) --no-print-directory --jobs=2 test-engines test-others || { $(failed_tests); exit 1; }
endif

test-engines: setup
	@$(PYTHON_IN_VENV) -m pytest -m "not full and engines" | tee .venv/test-engines.log | $(call with_prefix,engines)

test-others: setup
	@OMP_NUM_THREADS=1 $(PYTHON_IN_VENV) -m pytest -m "not full and not engines" | tee .venv/test-others.log | $(call with_prefix,others )

test-full: setup
	@$(PYTHON_IN_VENV) -m pytest $(ARGS)

# One thread, so that two shards do not wait for each other's cores.
chaos: setup
	@OMP_NUM_THREADS=1 $(PYTHON_IN_VENV) -m tests.chaos $(ARGS)

lint: setup
	@$(PYTHON_IN_VENV) -m ruff check .
	@$(PYTHON_IN_VENV) -m ruff format --check .
	@$(PYTHON_IN_VENV) -m mypy

house: setup
	@$(PYTHON_IN_VENV) -m benchmarks.house $(ARGS)

bench: setup
	@test -d runs/quickstart/sft/model || $(MAKE) --no-print-directory quickstart-models ARGS=
	@$(PYTHON_IN_VENV) -m benchmarks.schedules $(ARGS)
	@$(PYTHON_IN_VENV) -m benchmarks.muon

gpu-check: setup
	@$(PYTHON_IN_VENV) -m classroom_rl.launch.gpu_check $(ARGS)

docs: setup
	@$(PYTHON_IN_VENV) -m classroom_rl.environments.classroom.lesson_plans check
	@$(PYTHON_IN_VENV) -m classroom_rl.launch.prompt_docs docs/prompts.md
	@$(PYTHON_IN_VENV) -m classroom_rl.environments.marooned.rules_docs docs/marooned.md
	@$(PYTHON_IN_VENV) -m classroom_rl.config.reference docs/keys.md

# Leaves .venv alone: openenv asks for other versions than this project.
openenv-check:
	@bash src/classroom_rl/environments/marooned/openenv_server/check.sh

# The wheel is tried where there is nothing but its dependencies, and from another folder than this one.
release: setup
	@rm -f dist/classroom_rl-*
	@$(PYTHON_IN_VENV) -m build --no-isolation --outdir dist .
	@$(PYTHON_IN_VENV) -m twine check --strict dist/classroom_rl-*
	@empty=$$(mktemp -d) && trap 'rm -rf "$$empty"' EXIT && unset PYTHONPATH \
	    && $(PYTHON_IN_VENV) -m venv "$$empty/venv" \
	    && "$$empty/venv/bin/python" -m pip install --quiet --disable-pip-version-check dist/classroom_rl-*.whl \
	    && cd "$$empty" && venv/bin/classroom-rollouts --help >/dev/null \
	    && venv/bin/python -c 'import classroom_rl as cr; print("the wheel of classroom-rl", cr.__version__, "works")'
