"""A run's folder that was emptied and used anew, with the same run id, while machines wait beside it or run a replica.

Names of attempts come again there. Nothing of what was offered before may keep a machine from what is offered now.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from join_scene import Scene
from protocol_fleet import Fleet, play

from diloco_orchestrator.cli.join_command import only_own_offers
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.join.output import OutputPieces, lines_of
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import JoinEnd, Taken
from diloco_orchestrator.protocol.launched import Launched
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Run
from diloco_orchestrator.run_log.append import create_run
from diloco_orchestrator.run_log.launched_here import remember
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import keep_key, of_run
from diloco_orchestrator.signing.keys import RunKey
from diloco_orchestrator.store.base import ObjectInfo
from diloco_orchestrator.store.memory import MemoryStore
from diloco_orchestrator.supervision.end_of_leg import EndOfLeg
from diloco_orchestrator.supervision.launch_request import LaunchRequests
from executors.contract import ReplicaHandle, ReplicaState

STAMP = Stamp("test", lambda: 0.0)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def emptied(scene: Scene) -> None:
    for info in list(scene.store.list("")):
        scene.store.delete(info.key)


def at_look(scene: Scene, number: int, then: Callable[[], object]) -> None:
    """Do something just before a machine lists the offers for the `number`th time from now on, from 1."""
    listed, seen = scene.store.list, [0]

    def watched(prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        seen[0] += prefix == keys.JOINS
        if seen[0] == number:
            seen[0] += 1  # what it does may list, too
            then()
        return listed(prefix, start_after)

    scene.store.list = watched  # type: ignore[method-assign]


def taken_elsewhere(scene: Scene) -> ReplicaHandle:
    """An offered attempt that another machine has."""
    handle = scene.executor.launch(scene.request())
    about(scene, handle, Taken(**STAMP(), by="another"))
    return handle


def about(scene: Scene, handle: ReplicaHandle, record: Taken | JoinEnd) -> None:
    name = keys.JOIN_TAKEN if isinstance(record, Taken) else keys.JOIN_END
    scene.store.create(keys.join_record(handle.native_id, handle.native["offer"], name), record.to_bytes())


@pytest.mark.parametrize("late", [True, False], ids=["another machine writes late", "nothing is left"])
def test_a_machine_takes_an_offer_of_a_name_that_it_has_seen_spent(scene: Scene, late: bool):
    """The machine that had the old attempt may record its end just after the folder was emptied."""
    old = taken_elsewhere(scene)

    def anew() -> None:
        emptied(scene)
        if late:
            about(scene, old, JoinEnd(**STAMP(), state=ReplicaState.CANCELLED, reason="user"))
        scene.executor.launch(scene.request(env={"A": "new"}))

    at_look(scene, 3, anew)
    program = scene.program()
    assert scene.machine(program).run() == 0
    assert [env["A"] for env in program.started] == ["new"]


def test_a_machine_takes_an_offer_of_a_name_that_it_has_refused(scene: Scene):
    """Its user had forgotten a secret, or asked for one that the run does not need."""
    scene.executor.launch(scene.request(secrets={"HF_TOKEN": "a"}))

    def anew() -> None:
        scene.executor.forget("run-1")
        scene.executor.launch(scene.request())

    at_look(scene, 3, anew)
    program = scene.program()
    assert scene.machine(program).run() == 0 and len(program.started) == 1
    assert [each for each in scene.said if "not taken" in each] == [
        "not taken: replica 0, attempt 1 needs the secrets HF_TOKEN, which no bucket holds. Export them on this "
        "machine, then join again."
    ]


def test_a_free_offer_is_taken_before_spent_ones_are_read(scene: Scene):
    """A run of hundreds of preemptions has as many offers, of which each is a request before a machine trains."""
    for attempt in range(1, 6):
        about(scene, scene.executor.launch(scene.request(attempt=attempt)), Taken(**STAMP(), by="another"))
    free = scene.executor.launch(scene.request(attempt=6))
    read, get = list[str](), scene.store.get

    def watched(key: str, start: int = 0, end: int | None = None) -> bytes:
        if keys.join_offer.parse(key):
            read.append(key)
        return get(key, start, end)

    scene.store.get = watched  # type: ignore[method-assign]
    program = scene.program()
    assert scene.machine(program).run() == 0 and len(program.started) == 1
    assert set(read) == {keys.join_offer(free.native_id)}


def test_a_copy_of_an_offer_keeps_no_machine_from_the_offer(scene: Scene):
    """Refused under the name of another attempt, the same bytes are taken under their own."""
    handle = scene.executor.launch(scene.request())
    scene.store.put(keys.join_offer("dl-run-1-r0-a0"), scene.store.get(keys.join_offer(handle.native_id)))
    program = scene.program()
    assert scene.machine(program).run() == 0 and len(program.started) == 1
    assert "a0/offer.json offers dl-run-1-r0-a1" in scene.said[0]


def test_an_attempt_ends_whose_name_another_one_has_by_now(scene: Scene):
    """It would train in a run that is not its own, and write its output beside the other's."""
    handle = scene.executor.launch(scene.request(env={"A": "old"}))

    def anew() -> None:
        program.on_wait = lambda: None
        program.output = "of the new one\n"
        emptied(scene)
        scene.executor.launch(scene.request(env={"A": "new"}))

    program = scene.program(code=None, on_wait=anew, output="of the old one\n")
    ends_later = scene.machine(program, once=False, hours=1.0)
    assert ends_later.run() == 0
    assert [env["A"] for env in program.started] == ["old", "new"] and program.signals == ["TERM", "TERM"]
    assert not [info.key for info in scene.store.list("") if str(handle.native["offer"])[:32] in info.key]
    assert list(scene.executor.logs(handle)) == ["of the new one"]


def test_about_an_attempt_that_was_forgotten_as_its_process_ended_nothing_is_written(scene: Scene):
    """A machine looks at the bucket every few seconds, and once more before it says how an attempt ended."""
    scene.executor.launch(scene.request())
    program = scene.program(waits=0, on_wait=lambda: scene.executor.forget("run-1"), output="late\n")
    scene.machine(program).run()
    assert len(program.started) == 1 and list(scene.store.list("")) == []


def test_an_executor_knows_attempts_of_one_name_apart(scene: Scene):
    """A notebook in which one cell launches again what another has forgotten."""
    old = taken_elsewhere(scene)
    scene.executor.cancel(old)
    about(scene, old, JoinEnd(**STAMP(), state=ReplicaState.CANCELLED, reason="user"))
    assert scene.executor.poll(old).state is ReplicaState.CANCELLED
    scene.executor.forget("run-1")
    new = scene.executor.launch(scene.request())
    assert scene.executor.poll(new).state is ReplicaState.PENDING
    assert scene.executor.poll(old).state is ReplicaState.CANCELLED
    scene.executor.forget("run-1")
    status = scene.executor.poll(new)
    assert (status.state, status.reason) == (ReplicaState.PREEMPTED, "lost")


def test_output_that_is_there_already_hides_none(tmp_path: Path):
    """A machine that was writing as the folder was emptied leaves a piece behind."""
    store, file = MemoryStore(), tmp_path / "output"
    store.create(keys.join_piece("dl-a-r0-a1", 1), b"left behind\n")
    output = OutputPieces(store, "dl-a-r0-a1", file, str)
    for text in ("one\n", "one\ntwo\n", "one\ntwo\nthree\n"):
        file.write_text(text)
        output.write()
    found = lines_of(store, "dl-a-r0-a1", tail=None, passes=iter([True]))
    assert list(found) == ["one", "left behind", "two", "three"]


# -- another run in the same folder -----------------------------------------------------------------------------------


def run_of(scene: Scene, secret: str | None = None, key: RunKey | None = None, **config: Any) -> RunLog:
    """Create run-1 in the folder, which must be empty."""
    given = make_config({"entrypoint": "m:f", "replicas": 1, **config})
    run = Run(
        **STAMP(),
        run_id="run-1",
        config=given,
        package_version="0",
        code_sha256="1" * 64,
        secret_names=(secret,) if secret else (),
        signed_by=key.signed_by if key else None,
    )
    return create_run(of_run(scene.store), run, "test", STAMP)


def test_a_machine_notices_the_end_of_the_run_that_is_there_now(scene: Scene):
    Fleet(replicas=1, rounds=1, store=scene.store)

    def anew() -> None:
        emptied(scene)
        fleet = Fleet(replicas=1, rounds=2, store=scene.store)
        participant = fleet.join(0)
        for _ in range(3):
            play([participant], [1.0])
        run_log = RunLog(fleet.store)
        EndOfLeg(run_log, run_log.newest_begin(), STAMP).finalize()

    at_look(scene, 2, anew)
    assert scene.machine(scene.program()).run() == 0
    assert scene.said[-1].startswith("the run is over: completed")


def test_a_machine_waits_for_the_next_run_in_a_folder_that_was_emptied(scene: Scene):
    run_of(scene)
    at_look(scene, 2, lambda: emptied(scene))

    def anew() -> None:
        run_of(scene, env={"A": "b"})
        scene.executor.launch(scene.request())

    at_look(scene, 4, anew)
    program = scene.program()
    assert scene.machine(program).run() == 0 and len(program.started) == 1


def test_a_run_with_other_secrets_ends_a_machine_that_lacks_them(scene: Scene):
    run_of(scene)
    at_look(scene, 2, lambda: (emptied(scene), run_of(scene, secret="HF_TOKEN")))
    with pytest.raises(ConfigError, match="run run-1 needs the secrets HF_TOKEN"):
        scene.machine(scene.program()).run()


@pytest.mark.parametrize("signed", [True, False], ids=["by another key", "by nobody"])
def test_a_machine_for_one_key_runs_no_run_that_another_has_signed(scene: Scene, signed: bool):
    ours, other = RunKey(bytes([7] * 32)), RunKey(bytes([8] * 32))
    for key in (ours, other):
        keep_key(key)
    run_of(scene, key=ours)
    at_look(scene, 2, lambda: (emptied(scene), run_of(scene, key=other if signed else None)))
    with pytest.raises(ConfigError, match=f"{ours.signed_by.key} was asked for"):
        scene.machine(scene.program(), signed_by=ours.signed_by.key).run()


def test_a_link_is_for_the_run_that_it_names(scene: Scene):
    run_log = run_of(scene)
    at_look(scene, 2, lambda: (emptied(scene), run_of(scene, env={"A": "b"})))
    with pytest.raises(ConfigError, match="holds another run than the link names: it was replaced"):
        scene.machine(scene.program(), run_sha256=run_log.run_sha256).run()


@pytest.mark.parametrize("here", [True, False], ids=["launched here too", "launched elsewhere"])
def test_who_launches_again_here_runs_the_offers_of_the_new_run(here: bool, scene: Scene, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def launched(here: bool, **config: Any) -> None:
        run_log = run_of(scene, **config)
        if here:
            remember(run_log)
        scene.store.put(keys.code("1" * 64), b"code")
        requests = LaunchRequests(run_log.run, Launched(run_log.run_sha256), scene.url, dry=True)
        scene.executor.launch(requests.request(0, 1, False))

    launched(True, env={"A": "old"})
    at_look(scene, 1, lambda: scene.store.delete(keys.RUN))  # the first object that goes; the offer is still there
    at_look(scene, 3, lambda: (emptied(scene), launched(here, env={"A": "new"})))
    program = scene.program()
    assert scene.machine(program, dict(os.environ), why_not=only_own_offers(scene.store)).run() == 0
    assert [env["A"] for env in program.started] == (["new"] if here else [])
    assert here or "is not that of the run which you launched" in str(scene.said)
