"""What a run did, read from its bucket alone: rounds, who took part, digests, the hash chain, any round's model.

python examples/inspect_bucket.py URL
"""

import hashlib
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

from diloco_orchestrator import RunReader, open_store, pull
from diloco_orchestrator.protocol import keys

if __name__ == "__main__":
    store = open_store(sys.argv[1])
    reader = RunReader(store)
    print(f"{reader.run.run_id}: {reader.run.config.replicas} replicas, {reader.run.config.rounds} rounds planned")
    for row in reader.rows():
        print(f"round {row.round}: averaged {row.contributors}, held-out before {row.heldout}, {row.reason}")

    previous = hashlib.sha256(store.get(keys.START)).hexdigest()
    for commit in reader.commits():
        assert commit.previous == previous, f"round {commit.round} does not follow the one before"
        previous = hashlib.sha256(store.get(keys.commit(commit.round))).hexdigest()
    print(f"{len(reader.commits())} commits in one unbroken chain, the last is {previous[:16]}")

    folder = Path(tempfile.mkdtemp()) / "model"
    pull(sys.argv[1], folder, round_=1)  # any round: rebuilt where there is no snapshot
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        print(f"after round 1: {name} {tuple(tensor.shape)} has norm {tensor.norm():.3f}")
