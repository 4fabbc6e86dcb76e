"""The executor contract on machines that join: real `diloco join` processes over an S3 that checks signatures."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from faulty_proxy import Faults, FaultyProxy, proxy_before
from joined import Machines, children_of, running_machines
from s3_server import S3Server

from diloco_orchestrator.join.executor import JoinExecutor
from diloco_orchestrator.join.offers import offers_in, records_about
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Taken
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store
from executors.contract import ReplicaHandle
from executors.remote_base import run_label
from executors.testing import SECRET, ExecutorContract, Rig, wait_until

pytestmark = pytest.mark.slow
MACHINES = 4  # more than any test has attempts that run at the same time


class JoinRig(Rig):
    def __init__(self, machines: Machines, proxy: FaultyProxy, options: dict[str, Any]) -> None:
        self.machines_ = machines
        self.proxy = proxy
        self.options = options
        self.credentials = (options["secret"],)
        self.construct = (
            "from executors import JoinExecutor; executor = JoinExecutor(); "
            f"executor.use_store({machines.url!r}, {options!r})"
        )

    def executor(self, **storage_options: Any) -> JoinExecutor:
        made = JoinExecutor()
        made.use_store(self.machines_.url, {**self.options, **storage_options})
        return made

    def denied(self) -> JoinExecutor:
        return self.executor(secret="not the secret")

    def preempt(self, handle: ReplicaHandle) -> None:
        assert self.machines_.leave(self.machines_.of(handle)) == 75
        self.machines_.join()

    def hold(self, on: bool) -> None:
        if on:
            self.machines_.close()
        else:
            for _ in range(MACHINES):
                self.machines_.join()

    def failing(self, on: bool) -> None:
        self.proxy.faults = Faults(refused=1.0) if on else Faults()

    def forget(self, handle: ReplicaHandle) -> None:
        store = self.machines_.store
        for info in list(store.list(f"{keys.JOINS}{handle.native_id}/")):
            store.delete(info.key)

    def machines(self, run_id: str) -> int:
        found = [keys.parse_join_record(info.key) for info in self.machines_.store.list(keys.JOINS)]
        names = {each.name for each in found if each is not None and each.record == keys.JOIN_OFFER}
        return sum(name.startswith(f"dl-{run_label(run_id)}-") for name in names)


@pytest.fixture(scope="module")
def machines(s3_server: S3Server) -> Iterator[Machines]:
    url = f"s3://{s3_server.make_bucket(f'bucket-{uuid4().hex[:12]}')}/run"
    environ = {**s3_server.environ(), "HIDDEN": SECRET, "API_KEY": SECRET}
    with running_machines(url, open_store(url, s3_server.options()), environ, MACHINES) as machines:
        yield machines


@pytest.fixture
def rig(machines: Machines, s3_server: S3Server) -> Iterator[JoinRig]:
    with proxy_before(s3_server.url, Faults()) as (proxy, url):
        yield JoinRig(machines, proxy, s3_server.options(endpoint_url=url))
    clean(machines)


def clean(machines: Machines) -> None:
    """No attempt is left, in the bucket or on a machine; and no secret was ever there."""
    store = machines.store
    # Every attempt was cancelled. Its end would otherwise be recorded after the bucket was emptied.
    wait_until(
        lambda: not any(each.pid in machines.running() for each in unended(store)),
        "machines have recorded all ends",
    )
    for info in list(store.list("")):
        assert SECRET.encode() not in store.get(info.key), info.key
        if info.key.endswith(f"/{keys.JOIN_OFFER}"):
            store.delete(info.key)
    # A machine ends an attempt whose offer is gone, and writes nothing more about it.
    wait_until(lambda: not any(map(children_of, machines.running())), "no machine runs an attempt")
    for info in list(store.list("")):
        store.delete(info.key)


def unended(store: Store) -> list[Taken]:
    """The records by which machines took the attempts that have not ended, of offers that are there."""
    listed, found = offers_in(store.list(keys.JOINS)), []
    for name in listed:
        offer = sha256_hex(store.get(keys.join_offer(name)))
        if records_about(listed, name, offer) & {keys.JOIN_TAKEN, keys.JOIN_END} == {keys.JOIN_TAKEN}:
            key = keys.join_record(name, offer, keys.JOIN_TAKEN)
            found.append(Taken.from_bytes(store.get(key), key))
    return found


class TestJoin(ExecutorContract):
    pass
