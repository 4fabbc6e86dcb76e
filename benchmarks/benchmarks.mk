# Targets of the benchmarks; the Makefile above includes it, so all are called from there: `make bench-sync`, `make chaos`.

.PHONY: chaos chaos-table soak soak-table transfer large-model requests requests-live bench-allreduce bench bench-sync bench-link bench-overlap bench-latency bench-memory \
	bench-busy bench-history bench-startup bench-heldout_split bench-heldout_leaks bench-guard bench-guard-scaled bench-guard-runs bench-gpu bench-gpu-sync bench-quality bench-unequal bench-fleet bench-scale

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

# Store requests of a run while it goes on, launcher and screen included, beside `diloco plan`: some five minutes, or
# `make requests-live OPTIONS="--round-s 1200 --rounds 2"`.
requests-live: venv
	PYTHONPATH=tests/support $(BIN)/python benchmarks/live_requests.py $(OPTIONS)

# Requests and bytes of the stand-alone all-reduce by both of its paths: some seconds.
bench-allreduce: venv
	PYTHONPATH=tests/support $(BIN)/python benchmarks/allreduce_paths.py $(OPTIONS)

# The tables and pictures of docs/inside/performance.md, each in one command, on a quiet machine; `make bench` takes all of
# them. `make bench-sync SOURCES="--source OLD --source ."` measures two checkouts in turn; `OPTIONS=` passes others.
bench: bench-sync bench-link bench-overlap bench-latency bench-memory bench-busy bench-history bench-startup bench-heldout_split
bench-sync bench-link bench-overlap bench-latency bench-memory bench-busy bench-history bench-startup bench-heldout_split: bench-%: venv
	PYTHONPATH=tests/support $(BIN)/python benchmarks/$*.py --docs $(SOURCES) $(OPTIONS)

# False halts and delays of the guard's rules: the table of docs/inside/kill-switch-figures.md, about five minutes.
bench-guard: venv
	PYTHONPATH=. $(BIN)/python benchmarks/guard.py --runs 1000 --seed 2 --docs $(OPTIONS)

# The same rule with 4 of 16 replicas, and with fleets that grow and shrink: the table below that one.
bench-guard-scaled: venv
	PYTHONPATH=. $(BIN)/python benchmarks/guard_scaled.py --docs $(OPTIONS)

# The same rule over published reward hacks: "Public cases" there, some minutes of one core.
bench-guard-public: venv
	PYTHONPATH=. $(BIN)/python benchmarks/guard_public.py --docs $(OPTIONS)

# The same rule over 40 real runs and 20 in which something goes wrong: "Real runs" there, some 17 minutes on 2 cores.
bench-guard-runs: venv
	PYTHONPATH=. $(BIN)/python benchmarks/guard_runs.py --docs $(OPTIONS)

# Tokens per dollar of the choice of places, on virtual time: docs/inside/performance.md, some ten minutes a core; `--bound` (scipy) doubles it.
bench-fleet: venv
	PYTHONPATH=tests/support:benchmarks $(BIN)/python benchmarks/fleet.py --days 4 --repetitions 6 --docs

# Rounds of 4 to 1,024 replicas over a model of a store: docs/inside/performance.md, two minutes of one core.
bench-scale: venv
	PYTHONPATH=tests/support $(BIN)/python benchmarks/scale.py --docs $(OPTIONS)

# What a slower machine costs the others, with steps="equal" and "equal_time": docs/inside/performance.md, some ten minutes a core; `--bound` (scipy) doubles it.
bench-unequal: venv
	PYTHONPATH=tests/support:benchmarks $(BIN)/python benchmarks/unequal.py --docs

# Held-out loss against data-parallel at equal tokens, five seeds: docs/inside/quality.md, about twelve minutes on 2 free cores.
# Cut off, it goes on where it was.
bench-quality: venv
	PYTHONPATH=.:tests/support $(BIN)/python benchmarks/quality.py --docs $(OPTIONS)

# Which held-out texts leak with an edit, and which unrelated ones a split excludes: the tables of docs/recipes/heldout.md.
bench-heldout_leaks: venv
	PYTHONPATH=.:tests/support $(BIN)/python benchmarks/heldout_leaks.py --docs $(OPTIONS)

bench-gpu: venv
	PYTHONPATH=tests/support $(BIN)/python benchmarks/gpu_overlap.py --docs $(SOURCES) $(OPTIONS)

bench-gpu-sync: venv
	$(BIN)/python benchmarks/gpu_sync.py $(OPTIONS)

# A model sharded by fully_shard over one GPU as a replica and without us, of 1 billion parameters, and of 7 billion with LoRA.
bench-gpu-islands:
	$(PYTHON) benchmarks/gpu_islands.py $(OPTIONS)
