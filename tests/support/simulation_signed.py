"""Simulated runs that are signed: every process sees the bucket through a `SignedStore`, forgers write beneath it."""

import dataclasses
import re

from simulation import Simulation, played
from simulation_plan import Plan, forged_plan_of
from simulation_store import Bucket, InvariantBroken
from virtual_time import VirtualClock, VirtualTime

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.signatures import split_signed
from diloco_orchestrator.protocol.signed_objects import is_signed, parse_stored
from diloco_orchestrator.signing.kept_keys import ENV_ATTEMPT_KEY, ENV_RUN_KEY
from diloco_orchestrator.signing.keys import RunKey
from diloco_orchestrator.signing.signed_store import SignedStore
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.store.open_store import LASTING
from diloco_orchestrator.store.retrying import RetryPolicy

KEY = RunKey(bytes(range(32)))
_ENVIRON = {ENV_RUN_KEY: KEY.text()}


class SignedBucket(Bucket):
    """The bucket of a signed run, as a holder of the run's key sees it. `stored`: what lies there."""

    def __init__(self, time: VirtualTime, plan: Plan) -> None:
        super().__init__(time, plan)
        self.stored = _Stored(self)
        self.beneath = SignedStore(self.stored, _ENVIRON)
        self.forged = 0  # objects

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self.beneath.get(key, start, end)

    def put(self, key: str, data: bytes) -> None:
        self.beneath.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        return self.beneath.create(key, data)

    def list(self, prefix: str, start_after: str = ""):  # type: ignore[no-untyped-def]
        return self.beneath.list(prefix, start_after)

    def delete(self, key: str) -> None:
        self.beneath.delete(key)

    def forge(self, key: str, data: bytes) -> bool:
        """Write the record under its key, and under names and with signatures that are copied from others.

        Always False: none of these keys counts as harmed.
        """
        genuine = [info.key for info in self.stored.list("") if parse_stored(info.key) is not None]
        lines = [found for name in genuine if (found := split_signed(self.stored.get(name))) is not None]
        ends = {"A" * 86, *(name.rpartition("/")[2] for name in genuine[-8:])}
        for name in (key, *(f"{key}/{end}" for end in sorted(ends))):
            for line in (b"", *(signature.line() for _, signature in lines[-1:])):
                self.forged += MemoryStore.create(self.stored, name, data + line)
        return False


class _Stored(MemoryStore):
    """What lies in the bucket; tells the bucket which objects of the run were written, as their authors meant them."""

    def __init__(self, bucket: SignedBucket) -> None:
        super().__init__(bucket.url)
        self._bucket = bucket

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        self._tell(key, data, created=False)

    def create(self, key: str, data: bytes) -> bool:
        made = super().create(key, data)
        if made:
            self._tell(key, data, created=True)
        return made

    def _tell(self, name: str, data: bytes, created: bool) -> None:
        found = parse_stored(name)
        key = found.key if found else name
        body = split_signed(data) if is_signed(key) else None
        content = body[0] if body else data
        if created:
            self._bucket.sent[key] = content
        self._bucket._note(key, content)


class _Beneath(Bucket):
    """What `Network` takes for the bucket: the objects as they are stored."""

    def __init__(self, bucket: SignedBucket) -> None:
        self.url, self.written_at = bucket.url, bucket.written_at
        self._stored = bucket.stored

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._stored.get(key, start, end)

    def put(self, key: str, data: bytes) -> None:
        self._stored.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        return self._stored.create(key, data)

    def list(self, prefix: str, start_after: str = ""):  # type: ignore[no-untyped-def]
        return self._stored.list(prefix, start_after)

    def delete(self, key: str) -> None:
        self._stored.delete(key)


class SignedSimulation(Simulation):
    make_bucket = SignedBucket
    signed_by = KEY.signed_by

    @property
    def run_sha256(self) -> str:
        return sha256_hex(self.bucket.stored.get(keys.RUN))

    def network(self, clock: VirtualClock, retry: RetryPolicy = LASTING) -> Store:
        """The bucket as the process that asks sees it: a replica with the key of its attempt, others with the run's."""
        bucket, environ = self.bucket, _ENVIRON
        assert isinstance(bucket, SignedBucket)
        if who := re.fullmatch(r"\w+ (\d+)\.(\d+)", clock.world.current.name):
            epoch = 1 + sum(1 for _ in bucket.list(keys.KEYS))
            operator = KEY.operator(self.run_sha256, epoch)
            environ = {ENV_ATTEMPT_KEY: operator.of_attempt(self.run_sha256, int(who[1]), int(who[2])).text()}
        self.bucket = _Beneath(bucket)
        try:
            return SignedStore(super().network(clock, retry), environ)
        finally:
            self.bucket = bucket


def simulate_signed(seed: int) -> Simulation:
    """Play a signed run with and without its forgeries; returns the forged one.

    Raises `InvariantBroken` unless both have the same log, byte by byte, and the same calls to the store.
    """
    plan = signed_plan_of(seed)
    command = f"make simulate SIGNED=1 SEED={seed}"
    forged = played(plan, command, SignedSimulation)
    undisturbed = played(dataclasses.replace(plan, forgeries=()), command, SignedSimulation)
    for what, one, other in (
        ("log", forged.bucket.commits, undisturbed.bucket.commits),
        ("calls to the store", forged.digest.hexdigest(), undisturbed.digest.hexdigest()),
    ):
        if one != other:
            raise InvariantBroken(f"I13: seed {seed}: forgeries changed the {what}\nreproduce: {command}\n{plan}")
    if judged := [info.key for info in forged.bucket.list(keys.ROUNDS) if keys.unfounded.parse(info.key)]:
        raise InvariantBroken(f"seed {seed}: honest commits are void: {judged}\nreproduce: {command}\n{plan}")
    return forged


def signed_plan_of(seed: int) -> Plan:
    """A forged plan of a seed, without faults of the store that harm objects in it: those are of other plans."""
    return dataclasses.replace(forged_plan_of(seed), corrupt_payloads=(), lost_payloads=(), rots=())
