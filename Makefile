# Everything from a fresh machine: `make demo` runs the main job, `make test` passes the tests. Both set up .venv first.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
EXTRAS := s3,hf,modal,eks,torchft,tensorboard,trackio,wandb,composer,dev

.PHONY: venv demo test test-all test-loaded mutants simulate fuzz chaos chaos-table soak soak-table transfer large-model requests \
	bench bench-sync bench-link bench-overlap bench-latency bench-memory bench-busy bench-history bench-startup bench-heldout_split bench-guard \
	bench-guard-runs bench-gpu bench-quality docker slurm ceph kubernetes lint clean

venv: .venv/installed

# Byte-compiled here, on all cores, because pip would do it on one; the few files that do not compile are templates.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv --clear .venv
	$(PIP) install --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
	touch $@

demo: venv
	$(BIN)/diloco demo

test: lint
	$(BIN)/pytest -n 2 --dist worksteal -m 'not slow'

test-all: lint .venv/trainers
	$(BIN)/pytest -n auto --dist worksteal

# The trainers of others, which only slow tests need: 25 s to install.
.venv/trainers: .venv/installed
	$(PIP) install --no-compile -c constraints.txt -e '.[$(EXTRAS),trl,lightning]'
	touch $@

# A genuine Slurm for the slow tests of SlurmExecutor, which are skipped without; on Debian and Ubuntu, as root.
slurm:
	apt-get install -y --no-install-recommends munge slurmctld slurmd slurm-client

# A genuine Ceph for the slow tests of stores, which are skipped without; on Debian and Ubuntu, as root.
ceph:
	apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd ceph-common

# A genuine control plane for the slow tests of KubernetesExecutor, skipped without KUBERNETES_BIN; on Debian 12.
KUBERNETES := /tmp/kubernetes
kubernetes:
	sh tests/support/build_kubernetes.sh $(KUBERNETES)

# A genuine Docker for the slow tests of examples/docker_executor, which start a daemon of their own as root.
docker:
	apt-get install -y --no-install-recommends docker.io

# No verdict hangs on the wall clock: the same tests beside busy loops (see docs/testing.md).
LOOPS := 4
test-loaded: venv
	$(BIN)/python tests/support/busy.py $(LOOPS) $(BIN)/pytest -n 2 --dist worksteal -m 'not slow'

# Plants faults one after another and runs the tests that should notice: `make mutants ONLY=carry` for some of them.
mutants: venv
	$(BIN)/python tests/mutants/run.py $(if $(ONLY),--only '$(ONLY)')

# Whole runs with faults on virtual time: `make simulate SEEDS=100000`, or one of them with its log: `make simulate SEED=7`;
# with `WIDE=1` those with more replicas, settings and faults, with `FLIPS=1` those in which bits flip in memory.
SEEDS := 1000
simulate: venv
	PYTHONPATH=tests/support $(BIN)/python tests/simulation/run.py $(if $(FLIPS),--kind flips,$(if $(WIDE),--kind wide)) $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

# Mutated records and buckets through every reading command: `make fuzz RECORDS=1000000 BUCKETS=10000`.
RECORDS := 100000
BUCKETS := 500
fuzz: venv
	PYTHONPATH=tests/support $(BIN)/python tests/fuzz/run.py --records $(RECORDS) --buckets $(BUCKETS)

# What faults cost: `make chaos MINUTES=10 RATE=15` as often as wished (RATE=0 for the undisturbed twin), then the table.
MINUTES := 10
RATE := 15
chaos: venv
	PYTHONPATH=tests/support:benchmarks $(BIN)/python benchmarks/chaos.py piece --minutes $(MINUTES) --faults-per-hour $(RATE)

chaos-table: venv
	PYTHONPATH=tests/support:benchmarks $(BIN)/python benchmarks/chaos.py table

# What grows in a long run: `make soak MINUTES=60`, then the table.
soak: venv
	PYTHONPATH=tests/support:benchmarks $(BIN)/python benchmarks/soak.py piece --minutes $(MINUTES)

soak-table: venv
	PYTHONPATH=tests/support:benchmarks $(BIN)/python benchmarks/soak.py table

# Peak memory and the largest object from start to verify: `make large-model MILLIONS=3000 LIMIT_MIB=1024 MEMORY_MIB=2048`.
MILLIONS := 300
LIMIT_MIB := 64
MEMORY_MIB := 1024
large-model: venv
	$(BIN)/python benchmarks/large_model.py --millions $(MILLIONS) --limit-mib $(LIMIT_MIB) --memory-mib $(MEMORY_MIB)

# PUT and GET of 64 MiB through open_store against obstore itself, over http and https.
transfer: venv
	$(BIN)/python benchmarks/transfer.py
	$(BIN)/python benchmarks/transfer.py --tls

# Store requests of pull, attach, status and verify, here or side by side: `make requests SOURCES="--source OLD --source ."`.
requests: venv
	PYTHONPATH=tests/support $(BIN)/python benchmarks/count_requests.py $(SOURCES)

# The tables and pictures of docs/performance.md, each in one command, on a quiet machine; `make bench` takes all of
# them. `make bench-sync SOURCES="--source OLD --source ."` measures two checkouts in turn; `OPTIONS=` passes others.
bench: bench-sync bench-link bench-overlap bench-latency bench-memory bench-busy bench-history bench-startup bench-heldout_split
bench-sync bench-link bench-overlap bench-latency bench-memory bench-busy bench-history bench-startup bench-heldout_split: bench-%: venv
	PYTHONPATH=tests/support $(BIN)/python benchmarks/$*.py --docs $(SOURCES) $(OPTIONS)

# False halts and delays of the guard's rules: the table of docs/kill-switch.md, about five minutes.
bench-guard: venv
	PYTHONPATH=. $(BIN)/python benchmarks/guard.py --runs 1000 --seed 2 --docs $(OPTIONS)

# The same rule over 20 real healthy runs and 9 others: the second table there, about eight minutes on 2 cores.
bench-guard-runs: venv
	PYTHONPATH=. $(BIN)/python benchmarks/guard_runs.py --docs $(OPTIONS)

# Held-out loss against data-parallel at equal tokens, five seeds: docs/quality.md, about twelve minutes on 2 free cores.
# Cut off, it goes on where it was.
bench-quality: venv
	PYTHONPATH=.:tests/support $(BIN)/python benchmarks/quality.py --docs $(OPTIONS)

bench-gpu: venv
	PYTHONPATH=tests/support $(BIN)/python benchmarks/gpu_overlap.py --docs $(SOURCES) $(OPTIONS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist *.egg-info
