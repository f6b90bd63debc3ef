# Every target makes .venv by itself. `make gpu PYTHON=python3` runs with another interpreter instead,
# for machines where torch with CUDA is already installed.
VENV   := .venv
PYTHON ?= $(VENV)/bin/python
PIP    := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
STAMP  := $(VENV)/.installed

# An interpreter given by the caller is used as it is; only our own environment is built.
ifeq ($(PYTHON),$(VENV)/bin/python)
READY := $(STAMP)
endif

# Without compiled files each worker rewrites every test at every run, and each program of a test compiles memscale: 9 s.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := setup
.PHONY: setup demo test test-deep test-server fuzz lint bench gpu gpu-sanitize ghost ghost-tests ghost-bytes ghost-cover docs compat dist policy

setup: $(READY)

$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(PYTHON) -m memscale.cli demo $(ARGS)

# A test that hangs ends the run, and says where. A file's tests stay in one process: they share what they have made.
# Files run in their order, which ends with many short ones: by their number of tests, long files of few tests came last.
PYTEST := -m pytest -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true -n auto --dist loadfile \
	--no-loadscope-reorder

test: $(READY)
	$(PYTHON) $(PYTEST) $(ARGS)

# Every combination of transform, model and call pattern instead of every pair, and many more random programs.
test-deep: $(READY)
	HYPOTHESIS_PROFILE=deep $(PYTHON) $(PYTEST) $(ARGS)

# New random programs, EXAMPLES of each sort; a failure prints the smallest program that shows it, as Python. With
# BESIDE=1 another thread simulates steps meanwhile.
EXAMPLES ?= 5000
fuzz: $(READY)
	HYPOTHESIS_PROFILE=fuzz EXAMPLES=$(EXAMPLES) FUZZ_BESIDE=$(BESIDE) $(PYTHON) -m pytest -q -s tests/laws/test_programs.py $(ARGS)

# What `make test` leaves out: PostgreSQL, a browser where none is installed, all of the server's tests on both databases.
test-server: $(READY)
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || { \
		echo "test-server: there is no browser; apt-get install chromium" >&2; exit 1; }
	@command -v initdb > /dev/null || ls /usr/lib/postgresql/*/bin/initdb > /dev/null 2>&1 || { \
		echo "test-server: there is no PostgreSQL; apt-get install postgresql" >&2; exit 1; }
	$(PIP) --constraint constraints.txt playwright
	HYPOTHESIS_PROFILE=deep $(PYTHON) -m pytest tests/server $(ARGS)

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

bench: $(READY)
	@set -e; for bench in benchmarks/bench_*.py; do echo "== $$bench"; $(PYTHON) $$bench $(ARGS); done

gpu: $(READY)
	$(PYTHON) -m pytest -m cuda $(ARGS)
	$(PYTHON) benchmarks/bench_checkpoint.py --device cuda
	$(PYTHON) benchmarks/bench_tile.py --device cuda
	$(PYTHON) benchmarks/bench_cast.py --device cuda
	$(PYTHON) benchmarks/bench_predict.py --device cuda --variant 'plain|checkpoint' --json benchmarks/results/predict-cuda.json
	$(PYTHON) benchmarks/bench_offload.py --device cuda --json benchmarks/results/offload-cuda.json
	$(PYTHON) benchmarks/bench_host.py
	$(PYTHON) benchmarks/bench_operators.py
	$(PYTHON) benchmarks/bench_operators.py --convolutions
	$(PYTHON) benchmarks/bench_card.py --json benchmarks/results/card.json
	$(PYTHON) -m memscale.benchmarks --device cuda --models BERT,GPT-2,Llama-8B --output benchmarks/results/table-cuda.json
	$(PYTHON) benchmarks/bench_table.py benchmarks/results/table-cuda.json --json benchmarks/results/table-card.json

# Not part of `gpu`: it makes the tests many times slower, and not every machine has the tool.
gpu-sanitize: $(READY)
	@command -v compute-sanitizer > /dev/null || { \
		echo "gpu-sanitize: there is no compute-sanitizer on PATH; it comes with the CUDA toolkit, in its bin folder" >&2; \
		exit 1; }
	compute-sanitizer --tool memcheck --error-exitcode 1 $(PYTHON) -m pytest -m cuda tests/runtime/backends/test_cuda_runtime.py -q $(ARGS)

# The CUDA build of PyTorch on fake CUDA libraries: the bytes of a card, without a card. See tests/ghost/README.md. Only
# files with tests for a card: its environment has not all that others import. Each in a process of its own: what one
# leaves on the device (the workspaces of cuBLAS for each thread) would be free memory in the next one's measurement.
GHOST := .ghost

$(GHOST)/.installed: tests/ghost/setup.sh constraints.txt
	sh tests/ghost/setup.sh $(GHOST)
	@touch $@

$(GHOST)/.built: $(GHOST)/.installed $(wildcard tests/ghost/*.c tests/ghost/*.cpp) tests/ghost/build_libraries.py
	$(GHOST)/bin/python tests/ghost/build_libraries.py $(GHOST)/headers/nvidia/cu13/include $(GHOST)/headers/nvidia/cudnn/include
	@touch $@

ghost: ghost-tests ghost-bytes

ghost-tests: $(GHOST)/.built $(READY)
	@failed=; for file in $$(grep -rl 'mark\.cuda' tests --include='test_*.py'); do \
		echo "== $$file"; \
		PYTHONPATH=tests/ghost/fake_cupy:. GHOST_COPY=1000000000 OMP_NUM_THREADS=1 \
			$(GHOST)/bin/python -m pytest $$file -m 'cuda and not values' -q || test $$? = 5 || failed="$$failed $$file"; \
	done; test -z "$$failed" || { echo "ghost: failed:$$failed" >&2; exit 1; }

# A run that was cut goes on where it stopped, as long as the sources are the same.
COMPARE := benchmarks/bench_predict.py --ghost $(GHOST)/bin/python --threads 1 --journal $(GHOST)/compared.jsonl

ghost-bytes: $(GHOST)/.built $(READY)
	$(PYTHON) $(COMPARE) --every 12 $(ARGS)

# Every two settings of the benchmark together: 35 minutes on two cores that others used.
ghost-cover: $(GHOST)/.built $(READY)
	$(PYTHON) $(COMPARE) --json benchmarks/results/predict-ghost.json $(ARGS)

docs: $(READY)
	$(PIP) --constraint constraints.txt --editable '.[docs]'
	$(PYTHON) -m mkdocs build --strict --quiet
	HYPOTHESIS_PROFILE=deep $(PYTHON) -m pytest -q -m deep tests/test_docs.py

# Other releases of Python, PyTorch and transformers, in environments made on the spot: see tests/compat/matrix.py.
compat: $(READY)
	$(PYTHON) tests/compat/matrix.py $(ARGS)

# What a release would publish, installed by one command where nothing else is. Nothing is published.
dist: $(READY)
	rm -rf dist .dist
	$(PIP) build
	$(PYTHON) -m build --outdir dist .
	python3 -m venv .dist
	.dist/bin/python -m pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[cli,hf,plot]"
	cd .dist && bin/memscale demo
	rm -rf .dist

# Labels cases, proves a sample of them and fits policies to both: docs/policy.md has the tables. It goes on where it was,
# for SECONDS more of each; a configuration on a card takes two seconds to label, and eight to prove for one budget.
SECONDS ?= 1800

policy: $(READY)
	$(PIP) --constraint constraints.txt --editable '.[train]'
	$(PYTHON) benchmarks/policy/label.py --out benchmarks/policy/labels.jsonl.xz --seconds $(SECONDS) $(ARGS)
	$(PYTHON) benchmarks/policy/prove.py benchmarks/policy/labels.jsonl.xz --out benchmarks/policy/proven.jsonl --seconds $(SECONDS)
	$(PYTHON) benchmarks/policy/fit.py benchmarks/policy/labels.jsonl.xz benchmarks/policy/proven.jsonl
