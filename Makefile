# `make demo` and `make test` do everything on a machine that has Python 3.11+, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := runs/demo

.PHONY: help demo demo-decoder test check format results clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# torch comes first and pinned: an unpinned one would pull whatever build is newest.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "raptr needs Python 3.11 or later; set PYTHON=..., this one is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY) ## train a small BERT with RaPTr and with the full model, then compare (some minutes on two cores)
	$(BIN)/raptr pretrain demo --run $(DEMO)/raptr --method raptr --fresh
	$(BIN)/raptr pretrain demo --run $(DEMO)/full --method full --fresh
	$(BIN)/raptr report $(DEMO)/raptr $(DEMO)/full --out $(DEMO)/report

demo-decoder: $(READY) ## train a small decoder with RaPTr on Python's own text, then let it continue a line (2 minutes on one core)
	$(BIN)/raptr pretrain decoder-demo --run $(DEMO)/decoder --fresh
	$(BIN)/python -c 'from transformers import pipeline; print(pipeline("text-generation", "$(DEMO)/decoder/export")("def __init__(self", max_new_tokens=24, do_sample=False)[0]["generated_text"])'

test: $(READY) ## run the tests
	$(BIN)/python -m pytest -n 2

check: $(READY) ## lint, check the format, check the types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

results: $(READY) ## draw the tables and figures of docs/results again, from the records beside them
	$(BIN)/python -m docs.results.redraw

clean: ## remove the environment and the caches, never a run
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
