"""Machines that join and their executor in one process: who gets an attempt, how it ends, what is lost."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import diloco_here
from join_scene import Scene
from protocol_fleet import Fleet, play

from diloco_orchestrator.cli.join_command import only_own_offers
from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError, StoreDenied, StoreFull, StoreUnavailable
from diloco_orchestrator.inspection.logs import log_lines
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.join.attempt import end_of
from diloco_orchestrator.join.executor import JoinExecutor
from diloco_orchestrator.join.offers import name_of
from diloco_orchestrator.join.output import MOST_PIECES, PIECE_BYTES, OutputPieces, lines_of
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Handle, Offer, Taken
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.launched_here import remember
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.supervision.end_of_leg import EndOfLeg
from diloco_orchestrator.supervision.launch_request import LaunchRequests
from executors.contract import ExecutorError, ReplicaState, ReplicaStatus
from executors.mixed import MixedExecutor

SECRET = "a-secret-of-the-user-5612"
STAMP = Stamp("test", lambda: 0.0)


@pytest.fixture
def scene() -> Scene:
    return Scene()


# -- who gets an attempt ----------------------------------------------------------------------------------------------


def test_an_attempt_waits_runs_and_succeeds(scene: Scene):
    handle = scene.executor.launch(scene.request(env={"A": "b"}))
    assert scene.executor.poll(handle).state is ReplicaState.PENDING
    seen: list[ReplicaState] = []
    program = scene.program(
        on_wait=lambda: seen.append(scene.executor.poll(handle).state), output="one\ntwo\nDILOCO_EXIT {}"
    )
    assert scene.machine(program, {"HOME": "/home/me"}).run() == 0
    assert seen[0] is ReplicaState.RUNNING
    assert (program.started[0]["A"], program.started[0]["HOME"]) == ("b", "/home/me")
    assert scene.executor.poll(handle).state is ReplicaState.SUCCEEDED
    assert list(scene.executor.logs(handle)) == ["one", "two", "DILOCO_EXIT {}"]
    assert list(scene.executor.logs(handle, tail=1)) == ["DILOCO_EXIT {}"]


def test_output_of_a_machine_that_joined_is_read_by_whoever_reads_the_bucket(scene: Scene, tmp_path, monkeypatch):
    """It needed trust in the bucket, or an option that `diloco logs` does not have, though it lies there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # of a machine that has not launched the run
    config = make_config({"entrypoint": "m:f", "replicas": 1})
    spec = {"name": "join", "options": {"lost_after_s": "not read"}}
    log = create_run(
        scene.store, Run(**STAMP(), run_id="run-1", config=config, package_version="0", executor=spec), "test", STAMP
    )
    handle = scene.executor.launch(scene.request())
    record = Handle(**STAMP(), replica_id=0, attempt=1, handle=replace(handle, native={"store": "/else"}).to_json())
    log.store.create(keys.handle(0, 1), record.to_bytes())
    log.store.put(keys.intent(0, 1), b"{}")
    scene.machine(scene.program(output="one\ntwo\n")).run()
    assert list(log_lines(RunReader(log.store), 0, 1)) == ["one", "two"]


@pytest.mark.parametrize(("allowed", "polls"), [(None, 61), (1000, 24), (100, 11)])
def test_a_machine_asks_as_seldom_as_the_other_processes_of_its_run(scene: Scene, allowed: int | None, polls: int):
    class Limited(MemoryStore):
        reads = 0
        requests_allowed = allowed

        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            self.reads += key == keys.RUN
            return super().get(key, start, end)

    store = scene.store = Limited()
    run = Run(**STAMP(), run_id="run-1", config=make_config({"entrypoint": "m:f", "replicas": 4}), package_version="0")
    create_run(store, run, "test", STAMP)
    store.reads = 0
    assert scene.machine(scene.program(), hours=300 / 3600).run() == 0
    assert abs(store.reads - polls) <= 2


def test_of_two_machines_that_see_one_offer_one_gets_it(scene: Scene):
    scene.executor.launch(scene.request())
    second = scene.program()
    other = scene.machine(second, hours=0.1)
    first = scene.program()
    before_its_create(scene, other.run)
    assert scene.machine(first).run() == 0
    assert (len(first.started), len(second.started)) == (0, 1)


def test_a_withdrawn_offer_is_taken_by_nobody(scene: Scene):
    handle = scene.executor.launch(scene.request())
    scene.executor.cancel(handle)
    assert scene.executor.poll(handle).state is ReplicaState.CANCELLED
    program = scene.program()
    assert scene.machine(program).run() == 0 and program.started == []
    assert "1 hours are over" in scene.said[-1]


def before_its_create(scene: Scene, then: Callable[[], object]) -> None:
    """Do something once, just before the next create in the folder, which was decided on before."""
    create = scene.store.create

    def after(key: str, data: bytes) -> bool:
        scene.store.create = create  # type: ignore[method-assign]
        then()
        return create(key, data)

    scene.store.create = after  # type: ignore[method-assign]


def test_an_offer_that_is_withdrawn_while_a_machine_asks_for_it_is_taken_by_nobody(scene: Scene):
    handle = scene.executor.launch(scene.request())
    program = scene.program()
    before_its_create(scene, lambda: scene.executor.cancel(handle))
    assert scene.machine(program, hours=0.1).run() == 0
    assert program.started == [] and scene.executor.poll(handle).state is ReplicaState.CANCELLED


def test_an_offer_that_was_made_anew_is_taken_as_it_is_now(scene: Scene):
    handle = scene.executor.launch(scene.request(env={"A": "old"}))

    def meanwhile(offer: Offer) -> str:
        if offer.env["A"] == "old":
            scene.store.delete(keys.join_offer(handle.native_id))
            scene.executor.launch(scene.request(env={"A": "new"}))
        return ""

    program = scene.program()
    assert scene.machine(program, why_not=meanwhile).run() == 0
    assert [env["A"] for env in program.started] == ["new"]


def test_an_offer_under_another_attempts_name_is_refused(scene: Scene):
    """Whoever copies one would have the same replica trained twice."""
    handle = scene.executor.launch(scene.request())
    offer = scene.store.get(keys.join_offer(handle.native_id))
    scene.executor.cancel(handle)
    scene.store.put(keys.join_offer("dl-run-1-r0-a2"), offer)
    program = scene.program()
    assert scene.machine(program, hours=0.1).run() == 0
    assert program.started == [] and f"a2/offer.json offers {handle.native_id}: was it put there" in scene.said[0]


def test_a_machine_that_waits_asks_for_no_attempt_that_another_has(scene: Scene):
    taken(scene)
    written: list[str] = []
    scene.store.create = lambda key, data: written.append(key) is None and False  # type: ignore[method-assign]
    assert scene.machine(scene.program(), hours=0.1).run() == 0
    assert written == []


@pytest.mark.parametrize("record", [keys.JOIN_TAKEN, keys.JOIN_END, keys.JOIN_CANCEL, keys.JOIN_LEASE])
@pytest.mark.parametrize(
    "data", [b"[" * 100_000, Taken(write_id="x", at=0.0, by="nobody").to_bytes()], ids=["junk", "taken"]
)
def test_no_record_that_was_there_before_an_offer_keeps_machines_from_it(scene: Scene, record: str, data: bytes):
    """Names of attempts are predictable: whoever may write would have all of a run's attempts spent in advance."""
    for offer in ("", f"{'0' * 32}.", f"{'f' * 64}."):
        scene.store.create(f"{keys.JOINS}dl-run-1-r0-a1/{offer}{record}", data)
    handle = scene.executor.launch(scene.request())
    assert scene.executor.poll(handle).state is ReplicaState.PENDING
    program = scene.program()
    assert scene.machine(program).run() == 0 and len(program.started) == 1
    assert scene.executor.poll(handle).state is ReplicaState.SUCCEEDED
    assert scene.executor.find("run-1") == [handle]


def test_an_offer_that_cannot_be_read_is_nobodys(scene: Scene):
    scene.store.create(keys.join_offer("dl-run-1-r0-a0"), b"[" * 100_000)
    handle = scene.executor.launch(scene.request())
    assert scene.executor.find("run-1") == [handle]
    program = scene.program()
    assert scene.machine(program).run() == 0 and len(program.started) == 1
    assert [each.partition(":")[0] for each in scene.said if "a0" in each] == ["not taken"]


@pytest.mark.parametrize("key", [keys.result(999), keys.begin(999), keys.halt(999), keys.begin(2), keys.result(1)])
@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b'{"record":"result","schema_version":99}'])
def test_junk_of_legs_ends_no_machine_and_keeps_none_from_a_run_that_is_over(tmp_path: Path, key: str, data: bytes):
    scene = Scene()
    fleet = Fleet(replicas=1, rounds=1, store=scene.store)
    scene.store.create(key, data)
    scene.executor.launch(scene.request())
    program = scene.program()
    assert scene.machine(program).run() == 0 and len(program.started) == 1
    participant = fleet.join(0)
    for _ in range(2):
        play([participant], [1.0])
    run_log = RunLog(fleet.store)
    EndOfLeg(run_log, run_log.newest_begin(), STAMP).finalize()
    assert scene.machine(scene.program()).run() == 0
    assert scene.said[-1].startswith("the run is over: completed")


def test_a_machine_takes_only_the_replica_that_it_is_for(scene: Scene):
    scene.executor.launch(scene.request())
    scene.executor.launch(scene.request(replica_id=2))
    program = scene.program()
    scene.machine(program, replica=2).run()
    assert [each for each in scene.said if "runs here" in each] == ["replica 2, attempt 1: runs here as process 4711"]


def test_gpus_of_a_machine_are_those_that_its_person_names(scene: Scene):
    scene.executor.launch(scene.request(env={"B": "c"}))
    program = scene.program()
    scene.machine(program, gpus="2,3").run()
    assert program.started[0]["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_a_mixed_fleet_passes_the_runs_folder_on(scene: Scene):
    mixed = MixedExecutor([(JoinExecutor(), 1), (JoinExecutor(), 1)])
    mixed.use_store(scene.url, {})
    handles = [mixed.launch(scene.request(replica_id=replica_id)) for replica_id in range(2)]
    assert [status.state for status in mixed.poll_many(handles)] == [ReplicaState.PENDING] * 2
    assert [handle.native["store"] for handle in handles] == [scene.url] * 2


# -- secrets and trust ------------------------------------------------------------------------------------------------


def test_a_secret_stays_out_of_the_bucket_and_its_name_is_asked_for(scene: Scene):
    request = scene.request(secrets={"HF_TOKEN": SECRET, "DILOCO_STORAGE_OPTIONS": SECRET, "DILOCO_CODE_URL": SECRET})
    handle = scene.executor.launch(request)
    assert SECRET not in str(scene.executor.plan(request)) and "HF_TOKEN" in str(scene.executor.plan(request))
    assert not any(SECRET.encode() in scene.store.get(info.key) for info in scene.store.list(""))
    without = scene.program()
    scene.machine(without).run()
    assert without.started == []
    assert "needs the secrets HF_TOKEN, which no bucket holds. Export them on this machine" in scene.said[0]
    program = scene.program(output=f"the token is {SECRET}\n")
    assert scene.machine(program, {"HF_TOKEN": SECRET}).run() == 0
    assert program.started[0]["HF_TOKEN"] == SECRET
    assert list(scene.executor.logs(handle)) == ["the token is <HF_TOKEN redacted>"]


def test_a_credential_in_the_environment_of_an_offer_is_refused(scene: Scene):
    with pytest.raises(ValueError, match=r"env.API_KEY would be written into the bucket"):
        scene.executor.launch(scene.request(env={"API_KEY": "something"}))
    assert list(scene.store.list("")) == []


def test_joining_needs_trust_in_who_may_write_to_the_bucket(tmp_path: Path):
    """Also where the launcher has not begun the run yet."""
    (tmp_path / "bucket").mkdir()
    leaves_soon = ["--hours", "0.0003", "--every", "0.05"]  # if it should join all the same
    done = diloco_here("join", str(tmp_path / "bucket"), *leaves_soon, cwd=tmp_path)
    assert done.returncode == 2
    assert "this machine would run the code that" in done.stderr and "--signed-by" in done.stderr


@pytest.mark.parametrize("trust", [(), ("--trust-bucket",)])
def test_joining_makes_no_folder_and_waits_for_one_that_it_may_trust(trust: tuple[str, ...], tmp_path: Path):
    done = diloco_here("join", "runs/typo", *trust, "--hours", "0.0001", "--every", "0.05", cwd=tmp_path)
    assert done.returncode == 1 and f"there is no folder {tmp_path}/runs/typo. Check the address" in done.stderr
    assert ("Waiting for it." in done.stderr) == bool(trust) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("forged", "runs"),
    [
        ({}, True),
        ({"command": ("python", "-c", "print('mine')")}, False),
        ({"env": {"LD_PRELOAD": "/tmp/mine.so"}}, False),
        ({"code": "code/" + "9" * 64 + ".zip"}, False),
        ({"run_id": "run-2"}, False),
    ],
)
def test_who_launched_the_run_here_runs_its_offers_alone(forged, runs, scene: Scene, tmp_path: Path, monkeypatch):
    """run.json is known to be as it was launched; offers are whatever somebody has put into the bucket."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    stamp = Stamp("test", lambda: 0.0)
    config = make_config({"entrypoint": "m:f", "replicas": 1, "env": {"A": "b"}})
    given = {"run_id": "run-1", "config": config, "package_version": "0", "code_sha256": "1" * 64}
    run = Run(**stamp(), **given, secret_names=("HF_TOKEN",))
    remember(create_run(scene.store, run, "test", stamp))
    requests = LaunchRequests(
        run, Launched(sha256_hex(run.to_bytes())), scene.store.url, secrets={"HF_TOKEN": SECRET}, dry=True
    )
    offer = scene.executor._offer(requests.request(0, 1, False)).model_copy(update=forged)
    name = name_of(offer)
    assert scene.store.create(keys.join_offer(name), offer.to_bytes())
    scene.store.put(keys.code("1" * 64), b"code")
    program = scene.program()
    machine = scene.machine(program, {"HF_TOKEN": SECRET}, why_not=only_own_offers(scene.store))
    assert machine.run() == 0 and bool(program.started) == runs
    assert runs or "is not that of the run which you launched" in scene.said[0]


def test_without_a_run_the_executor_says_what_to_name():
    with pytest.raises(ExecutorError, match="diloco doctor URL"):
        JoinExecutor().find("run-1")


# -- the end ----------------------------------------------------------------------------------------------------------

LEFT = ReplicaStatus(ReplicaState.PREEMPTED, "lost", message="its machine left")
CANCELLED = ReplicaStatus(ReplicaState.CANCELLED, "user")
LATE = ReplicaStatus(ReplicaState.TIMED_OUT, "deadline")


@pytest.mark.parametrize(
    ("code", "asked", "state", "reason"),
    [
        (0, None, ReplicaState.SUCCEEDED, "exit"),
        (0, CANCELLED, ReplicaState.SUCCEEDED, "exit"),
        (1, None, ReplicaState.FAILED, "exit"),
        (-9, None, ReplicaState.FAILED, "exit"),
        (75, None, ReplicaState.PREEMPTED, "exit"),
        (78, None, ReplicaState.FAILED, "permanent"),
        (75, LEFT, ReplicaState.PREEMPTED, "exit"),
        (-9, LEFT, ReplicaState.PREEMPTED, "lost"),
        (75, CANCELLED, ReplicaState.CANCELLED, "user"),
        (75, LATE, ReplicaState.TIMED_OUT, "deadline"),
    ],
)
def test_an_exit_code_and_what_was_asked_for_make_the_end(
    code: int, asked: ReplicaStatus | None, state: ReplicaState, reason: str
):
    end = end_of(code, asked)
    assert (end.state, end.reason, end.exit_code) == (state, reason, code)


def test_a_signal_lets_the_replica_leave_and_is_a_preemption(scene: Scene):
    handle = scene.executor.launch(scene.request())
    program = scene.program(code=None)
    machine = scene.machine(program, once=False)
    program.on_wait = lambda: machine.leave("SIGTERM")
    assert machine.run() == 75
    status = scene.executor.poll(handle)
    assert (status.state, status.exit_code) == (ReplicaState.PREEMPTED, 75)
    assert program.signals == ["TERM"]


def test_a_replica_that_does_not_leave_is_killed_and_still_preempted(scene: Scene):
    handle = scene.executor.launch(scene.request())
    program = scene.program(code=None, asked_code=None)
    assert scene.machine(program, once=False, hours=0.01).run() == 0
    assert program.signals == ["TERM", "KILL"]
    assert scene.executor.poll(handle).state is ReplicaState.PREEMPTED


def test_a_cancel_reaches_the_machine(scene: Scene):
    handle = scene.executor.launch(scene.request())
    program = scene.program(code=None, on_wait=lambda: scene.executor.cancel(handle))
    assert scene.machine(program).run() == 75
    assert scene.executor.poll(handle).state is ReplicaState.CANCELLED


def test_a_machine_that_the_bucket_refuses_for_a_while_leaves_its_replica_alone(scene: Scene):
    """Tokens are renewed; a replica that is refused for good ends by itself."""
    handle = scene.executor.launch(scene.request())
    put, refused = scene.store.put, []

    def refusing(key: str, data: bytes) -> None:
        if len(refused) < 3:
            refused.append(key)
            raise StoreDenied("the token has expired.")
        put(key, data)

    program = scene.program(waits=6, on_wait=lambda: setattr(scene.store, "put", refusing))
    assert scene.machine(program).run() == 0
    assert len(refused) == 3 and program.signals == []
    assert scene.executor.poll(handle).state is ReplicaState.SUCCEEDED


@pytest.mark.parametrize("record", ["taken", "lease", "end"])
def test_a_machine_waits_while_the_bucket_is_full(scene: Scene, record: str):
    handle = scene.executor.launch(scene.request())
    scene.store = Full(scene.store, record, scene.clock)
    assert scene.machine(scene.program()).run() == 0
    assert scene.executor.poll(handle).state is ReplicaState.SUCCEEDED


class Full:
    """A store in which for a minute there is no room for objects of which the key holds a word."""

    def __init__(self, store: Store, word: str, clock: ManualClock) -> None:
        self._store, self._word, self._clock, self._until = store, word, clock, clock.now() + 60.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def _check_room(self, key: str) -> None:
        if self._word in key and self._clock.now() < self._until:
            raise StoreFull(f"cannot write {key}: no space left.")

    def create(self, key: str, data: bytes) -> bool:
        self._check_room(key)
        return self._store.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._check_room(key)
        self._store.put(key, data)


def test_a_machine_on_which_everything_fails_leaves(scene: Scene):
    for attempt in range(1, 6):
        scene.executor.launch(scene.request(attempt))
    program = scene.program(code=1)
    assert scene.machine(program, once=False).run() == 1
    assert len(program.started) == 3 and "diloco doctor" in scene.said[-1]


# -- what is lost -----------------------------------------------------------------------------------------------------


def taken(scene: Scene, attempt: int = 1) -> object:
    """An attempt whose machine has vanished."""
    handle = scene.executor.launch(scene.request(attempt))
    record = Taken(**Stamp("gone", scene.clock.wall_time)(), by="gone")
    scene.store.create(keys.join_record(handle.native_id, handle.native["offer"], keys.JOIN_TAKEN), record.to_bytes())
    return handle


def test_a_machine_without_a_sign_of_life_is_lost_for_good(scene: Scene):
    handle = scene.executor.launch(scene.request())
    asleep, states = [False], []

    def sleep() -> None:
        """The laptop is shut for ten minutes, and opened again."""
        if not asleep[0]:
            asleep[0] = True
            states.append(scene.executor.poll(handle).state)
            scene.clock.advance(600.0)
            states.append(scene.executor.poll(handle).state)

    program = scene.program(code=None, on_wait=sleep)
    assert scene.machine(program, hours=2.0).run() == 75
    assert states == [ReplicaState.RUNNING, ReplicaState.PREEMPTED]
    assert program.signals == ["TERM"] and "its coordinator has given it up" in scene.said[-2]
    status = scene.executor.poll(handle)
    assert (status.state, status.reason) == (ReplicaState.PREEMPTED, "lost")
    another = JoinExecutor()
    another.use_store(scene.url, {})
    assert another.poll(handle) == status  # for every coordinator


def test_about_an_attempt_that_was_forgotten_a_machine_writes_nothing_more(scene: Scene):
    scene.executor.launch(scene.request())
    program = scene.program(code=None, on_wait=lambda: scene.executor.forget("run-1"), output="one\n")
    assert scene.machine(program, hours=2.0).run() == 75
    assert program.signals == ["TERM"] and list(scene.store.list("")) == []


def test_silence_is_measured_on_the_clock_of_who_polls_and_while_it_can_read(scene: Scene):
    handle = taken(scene)
    executor = scene.executor
    assert executor.poll(handle).state is ReplicaState.RUNNING  # type: ignore[arg-type]
    scene.clock.advance(100.0)
    (url,) = executor._opened
    store, executor._opened[url] = executor._opened[url], Down()
    assert executor.poll(handle).state is ReplicaState.UNKNOWN  # type: ignore[arg-type]
    executor._opened[url] = store
    scene.clock.advance(100.0)
    assert executor.poll(handle).state is ReplicaState.RUNNING  # type: ignore[arg-type]
    scene.clock.advance(119.0)
    assert executor.poll(handle).state is ReplicaState.RUNNING  # type: ignore[arg-type]
    scene.clock.advance(2.0)
    assert executor.poll(handle).state is ReplicaState.PREEMPTED  # type: ignore[arg-type]


class Down(MemoryStore):
    def list(self, prefix: str, start_after: str = "") -> "Iterator[object]":  # type: ignore[override]
        raise StoreUnavailable("no route to the bucket.")


# -- output -----------------------------------------------------------------------------------------------------------


def test_output_is_bounded_and_its_end_is_there(tmp_path: Path):
    store, file = MemoryStore(), tmp_path / "output"
    line = "x" * (PIECE_BYTES // 4 - 1) + "\n"
    file.write_text(line * (4 * MOST_PIECES + 40) + "the last words")
    output = OutputPieces(store, "dl-a-r0-a1", file, str)
    for _ in range(MOST_PIECES):
        output.write()  # a part of it: a machine has a lease to renew in between
    assert len(list(store.list(""))) == MOST_PIECES
    output.write(to_end=True)
    found = [info.size for info in store.list("")]
    assert len(found) == MOST_PIECES + 1 and max(found) <= PIECE_BYTES + 100
    note, *_, last = lines_of(store, "dl-a-r0-a1", tail=6, passes=iter([True]))
    assert "bytes of output are missing here" in note and last == "the last words"


def test_a_line_is_one_line_however_it_was_cut(tmp_path: Path):
    store, file = MemoryStore(), tmp_path / "output"
    file.write_text("short\n" + "y" * (2 * PIECE_BYTES) + "\nlast")
    output = OutputPieces(store, "dl-a-r0-a1", file, str)
    output.write()
    output.write(to_end=True)
    assert [len(each) for each in lines_of(store, "dl-a-r0-a1", tail=None, passes=iter([False, True]))] == [
        5,
        2 * PIECE_BYTES,
        4,
    ]


def test_a_piece_whose_reply_was_lost_is_written_once(tmp_path: Path):
    store, file = LostReply(), tmp_path / "output"
    file.write_text("one\n")
    output = OutputPieces(store, "dl-a-r0-a1", file, str)
    with pytest.raises(StoreUnavailable):
        output.write()
    file.write_text("one\ntwo\n")
    output.write()
    assert list(lines_of(store, "dl-a-r0-a1", tail=None, passes=iter([True]))) == ["one", "two"]


class LostReply(MemoryStore):
    lost = False

    def create(self, key: str, data: bytes) -> bool:
        made = super().create(key, data)
        if not self.lost:
            self.lost = True
            raise StoreUnavailable("no reply.")
        return made


def test_a_run_whose_secrets_are_not_here_ends_the_join_at_once(tmp_path: Path):
    from diloco_orchestrator.config import make_config
    from diloco_orchestrator.protocol.records import Run

    scene = Scene()
    run = Run(
        **Stamp("launcher", scene.clock.wall_time)(),
        run_id="run-1",
        config=make_config({"entrypoint": "m:f"}),
        package_version="0.3.0",
        secret_names=("HF_TOKEN",),
    )
    scene.store.create(keys.RUN, run.to_bytes())
    with pytest.raises(ConfigError, match="run run-1 needs the secrets HF_TOKEN"):
        scene.machine(scene.program()).run()
