"""What signing costs a replica in a round: CPU time of its own writes and of reading the others' records.

    python benchmarks/signing.py
    python benchmarks/signing.py --strays 100000

One process plays a round of one replica over memory: it writes payload, manifest and commit, lists the round and reads
every other manifest and the commit, unsigned and signed. Prints milliseconds of CPU time for each number of replicas.

With `--strays` it lists the manifests of a round, below which somebody without a key has put so many objects, twice:
by who has a key of the run and by who has none. Prints microseconds of CPU time for each object.
"""

import argparse
import statistics
import time

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from diloco_orchestrator.config import make_config
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.protocol.signed_objects import stored_name
from diloco_orchestrator.signing.kept_keys import ENV_ATTEMPT_KEY
from diloco_orchestrator.signing.keys import RunKey
from diloco_orchestrator.signing.signed_store import SignedStore
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore

REPLICAS = (4, 8, 32)
ROUNDS = 20
FIELDS = b'"attempt":1,"replica_id":%d,"filler":"' + b"x" * 2000 + b'"}\n'  # a manifest of a small model has 2 KB


def manifest(replica_id: int) -> bytes:
    return b"{" + FIELDS % replica_id


def cpu_s(stores: list[Store], round_: int) -> float:
    """CPU seconds of replica 0 in a round; the others' objects are written before."""
    for replica_id, store in enumerate(stores[1:], 1):
        store.create(keys.payload(round_, replica_id, 1, 0), b"payload")
        store.create(keys.contribution(round_, replica_id), manifest(replica_id))
    began, ours = time.process_time(), stores[0]
    ours.create(keys.payload(round_, 0, 1, 0), b"payload")
    ours.create(keys.state(0, round_, 1), b"state")
    ours.create(keys.contribution(round_, 0), manifest(0))
    for info in list(ours.list(keys.contributions(round_))):
        ours.get(info.key)
    for replica_id in range(1, len(stores)):
        ours.get(keys.payload(round_, replica_id, 1, 0))
    ours.create(keys.commit(round_), b'{"by":"replica 0, attempt 1"}\n')
    ours.get(keys.commit(round_))
    return time.process_time() - began


def stores_of(replicas: int, signed: bool) -> list[Store]:
    key, stored = RunKey.generate(), MemoryStore()
    run = Run(
        write_id="w",
        at=0.0,
        run_id="r",
        config=make_config({"entrypoint": "m:f", "replicas": replicas}),
        package_version="0",
        signed_by=key.signed_by if signed else None,
    )
    stored.create(keys.RUN, run.to_bytes())
    sha256 = sha256_hex(run.to_bytes())
    operator = key.operator(sha256)
    secrets = [operator.of_attempt(sha256, replica_id, 1).text() for replica_id in range(replicas)]
    return [SignedStore(stored, {ENV_ATTEMPT_KEY: secret}) for secret in secrets]


def strays(count: int) -> None:
    """A poll of a round below whose manifests somebody has put objects: of keys of their own, or all of one key."""
    stranger = Ed25519PrivateKey.generate()  # a signature by some key costs its reader more than random characters
    print("names | listed by | first poll, us an object | next poll | of the listing itself")
    for what in ("of a key each", "of one key"):
        ours = stores_of(2, True)[0]
        assert isinstance(ours, SignedStore)
        for number in range(count):
            of = number if what == "of a key each" else 0
            name = stored_name(keys.contribution(1, of), 0, stranger.sign(str(number).encode()))
            ours.beneath.create(name, b"")
        readers = {"nobody's rules": ours.beneath, "a replica": ours, "who has no key": SignedStore(ours.beneath, {})}
        used = {}
        for who, store in readers.items():
            used[who] = []
            for _ in range(2):
                began = time.process_time()
                for _ in store.list(keys.contributions(1)):
                    pass
                used[who].append(1e6 * (time.process_time() - began) / count)
        (plain, _), *found = (used.pop("nobody's rules"), *used.items())
        for who, (first, following) in found:
            print(f"{what} | {who} | {first - plain:.1f} | {following - plain:.1f} | {plain:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strays", type=int, help="objects that nobody of the run has written")
    if (count := parser.parse_args().strays) is not None:
        strays(count)
        return
    print("replicas | unsigned, ms | signed, ms | more, ms")
    for replicas in REPLICAS:
        plain, signed = (
            1000 * statistics.median(cpu_s(stores, round_) for round_ in range(2, ROUNDS + 2))
            for stores in (stores_of(replicas, False), stores_of(replicas, True))
        )
        print(f"{replicas:8} | {plain:12.2f} | {signed:10.2f} | {signed - plain:8.2f}")


if __name__ == "__main__":
    main()
