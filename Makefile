# make demo: sets up and runs the main job, three minutes. make test: sets up and passes the tests.
# make long-test: what takes long, and needs Lightning, Accelerate, Transformers, torchft, and
# optimizers from their packages.
# make browser-test: the TensorBoard page in a real browser.
# make gpu-test: what needs a CUDA device (skipped, and said so, without one).
# make oldest-test, newest-test: unit and distributed tests with the oldest torch that pip lets in, and
# with one that is newer than the pinned one (each 4 GB of CUDA).
# make docs: the site of docs/, with the API's docstrings, in site/.
# make soak: 20,000 steps with all that a long run meets. make faults: docs/research/reliability.md's table.
# make fuzz: random configurations held to invariants (make long-test: 60 of them, always the same).
PYTHON ?= python3
FUZZ ?= 200
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
NEWEST_TORCH := 2.14.1
OTHER_TORCH := 2.6.0
OTHER := .venv-torch-$(OTHER_TORCH)
OTHER_TESTS := dense invariant exchanges momentum updates resume local_steps fsdp lifecycle \
	as_they_are saved_forms compatibility compile wrappers nonfinite two_level

# The tests start some two thousand processes. Without .pyc files each compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test long-test browser-test gpu-test oldest-test newest-test newest-torch other-torch-test
.PHONY: soak fuzz faults lint docs bench clean

demo: $(STAMP)
	rm -rf logs/demo
	$(BIN)/python -m runs compare --verbose --workers 2 --network 10mbit --contender goodput:steps=500 \
		--contender dense:steps=20 --eval-every 20 --slice 0 --log-dir logs/demo
	$(BIN)/python -m runs report logs/demo
	@echo "See it: $(BIN)/tensorboard --logdir logs/demo/runs"

test: $(STAMP) lint
	$(BIN)/python -m pytest --numprocesses 2 tests/unit
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile tests/integration tests/distributed

long-test: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lightning,hf]' \
		"torchft; sys_platform == 'linux'" dadaptation lion-pytorch muon-optimizer prodigyopt \
		pytorch-optimizer schedulefree torchao
	$(BIN)/python -m pytest --numprocesses 2 -m long tests

browser-test: $(STAMP)
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
		echo "make browser-test needs chromium and chromedriver: apt-get install chromium chromium-driver"; \
		exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	$(BIN)/python -m pytest -m browser tests/integration/browser

gpu-test: $(STAMP)
	$(BIN)/python -m pytest -rs tests/gpu

# Without the extra `dev`: it wants a newer Triton than this torch brings along.
oldest-test:
	$(MAKE) other-torch-test OTHER_TORCH=2.6.0

newest-test:
	$(MAKE) other-torch-test OTHER_TORCH=$(NEWEST_TORCH)

newest-torch:
	$(MAKE) .venv-torch-$(NEWEST_TORCH)/installed OTHER_TORCH=$(NEWEST_TORCH)

other-torch-test: $(OTHER)/installed
	$(OTHER)/bin/python -m pytest -rs --numprocesses 2 tests/unit
	$(OTHER)/bin/python -m pytest -rs --numprocesses 2 --dist loadfile \
		$(OTHER_TESTS:%=tests/distributed/test_%.py)

soak: $(STAMP)
	$(BIN)/python -m tests.distributed.soak --steps 20000

fuzz: $(STAMP)
	FUZZ=$(FUZZ) $(BIN)/python -m pytest --numprocesses 2 -m long tests/distributed/test_fuzz.py

faults: $(STAMP)
	$(BIN)/python -m tests.faults --out docs/research/reliability.md

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A warning of MkDocs, such as a link that leads nowhere, is an error (strict in mkdocs.yml).
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

bench: $(STAMP)
	$(BIN)/python -m runs bench

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

# The versions of all but torch, and what it has its own opinion of, are those that CI runs.
$(OTHER)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHER)
	sed -E '/^(torch|triton|sympy|mpmath)==/d' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt \
		torch==$(OTHER_TORCH) pytest pytest-timeout pytest-xdist hypothesis \
		--editable '.[all]'
	touch $(OTHER)/installed

clean:
	rm -rf $(VENV) .venv-python3.* .venv-torch-* logs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
