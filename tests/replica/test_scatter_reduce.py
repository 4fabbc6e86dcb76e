"""Rounds of a run by scatter-reduce: the bits of a gather, whoever dies or lies among those who read and average."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from protocol_fleet import FAST, Fleet, HurriedClock, close, report, together

from diloco_orchestrator.allreduce.dealing import (
    ASSUMED,
    Dealing,
    Link,
    dealers,
    dealing_of,
    path_of,
    scatters,
    shard_numel_for,
)
from diloco_orchestrator.allreduce.vectors import FlatTensors
from diloco_orchestrator.clock import Clock, SystemClock
from diloco_orchestrator.codecs.table import encode, get_codec
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.inspection.costs import forecast
from diloco_orchestrator.inspection.status import NewRows
from diloco_orchestrator.inspection.verify.chain import verify_run
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.allreduce_records import MeasuredLink, Reduced
from diloco_orchestrator.protocol.check_records import AverageCheck, Checked, CheckNamed, PublishedAverage, ReadShards
from diloco_orchestrator.protocol.digests import bulk_digest, sha256_hex
from diloco_orchestrator.protocol.records import Commit, Contribution
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.rebuild import rebuild
from diloco_orchestrator.store.memory import MemoryStore
from replica.rounds.participant import Participant

WIDE, HIGH = 256, 128  # 32,896 parameters: nine shards
FALSE = encode(torch.full((shard_numel_for(WIDE * HIGH + HIGH, 5, 2**24),), 0.5), "fp32")  # no average of the runs'
REPLICAS = 4


class Watched(MemoryStore):
    """Counts the payload shards that are read, and applies `change` to every object that is created."""

    def __init__(self) -> None:
        super().__init__()
        self.read = Counter[tuple[int, int]]()  # (author, shard)
        self.bytes_down = 0  # of payloads and reduced shards
        self.change: Callable[[str, bytes], bytes] = lambda _, data: data

    def get(self, key: str, *args: Any) -> bytes:
        if (payload := keys.parse_payload(key)) is not None:
            self.read[payload.replica_id, payload.shard] += 1
        data = super().get(key, *args)
        if payload is not None or keys.parse_reduced_shard(key) is not None:
            self.bytes_down += len(data)
        return data

    def create(self, key: str, data: bytes) -> bool:
        return super().create(key, self.change(key, data))


def model(wide: int = WIDE) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(wide, HIGH)


def fleet_of(
    path: str, wide: int = WIDE, clock: Clock | None = None, link: Link | None = None, **settings: Any
) -> tuple[Fleet, list[Participant]]:
    clock = clock or HurriedClock()
    timing = {**FAST, "poll_s": 0.2, "round_timeout_s": 600.0, "startup_timeout_s": 600.0}
    settings = {"replicas": REPLICAS, "timing": timing, "quorum": None, "path": path, **settings}
    store = Watched()
    if link is not None:
        store.create(keys.LINK, MeasuredLink(write_id="0", at=0.0, rank=3, **link._asdict()).to_bytes())
    fleet = Fleet(store=store, clock=clock, **settings)
    return fleet, [fleet.join(i, model=model(wide)) for i in range(fleet.replicas)]


def contribute(participant: Participant) -> Contribution:
    generator = torch.Generator().manual_seed(participant._attempt.replica_id)
    base = participant.base
    vector = FlatTensors([torch.randn(base.numel(base.fragments[0]), generator=generator)])
    return participant._contributor.contribute_delta(vector, report())


def played(participants: list[Participant]) -> Commit:
    """The round's commit, after all have contributed and closed it."""
    for each in participants:
        contribute(each)
    return together([lambda each=each: close(each) for each in participants])[0].commit  # type: ignore[misc]


def assert_right(fleet: Fleet, participants: list[Participant]) -> None:
    """All hold the base that payloads alone give, and `verify` agrees."""
    log = RunLog(fleet.store)
    assert {each.digest for each in participants} == {rebuild(log, log.begins()[0]).digest}
    assert verify_run(fleet.store).disagreement is None


def of_shards(participants: list[Participant]) -> int:
    return len(participants[0].base.shards(0))


def test_all_hold_the_base_of_a_gather_and_read_fewer_payloads():
    fleet, participants = fleet_of("scatter_reduce")
    commit = played(participants)
    assert [each.averaged for each in commit.answers] == [True] * REPLICAS and commit.checks
    shards, reads = of_shards(participants), sum(fleet.engine.read.values())
    # Before the commit each reads half of the others' shards and some as a deputy, then one drawn shard more.
    assert shards == 9 and reads < 0.85 * REPLICAS * (REPLICAS - 1) * shards
    assert_right(fleet, participants)
    assert verify_run(fleet.store).disagreement is None
    for info in list(fleet.store.list(keys.reduced_shards(1))):
        fleet.engine.delete(info.key)
    assert verify_run(fleet.store).disagreement is None  # which needs no reduced shard


@pytest.mark.parametrize(("replicas", "codec"), [(4, "fp32"), pytest.param(6, "int4", marks=pytest.mark.slow)])
def test_plan_and_status_foretell_the_bytes_that_are_read_within_one_per_cent(replicas, codec):
    """Counted at the store, over rounds enough that what is drawn averages out."""
    numel, rounds = 4 * replicas * 4096, 6
    width = numel // 128 - 1
    fleet, participants = fleet_of(
        "scatter_reduce", wide=width, clock=SystemClock(), replicas=replicas, codec=codec, rounds=rounds
    )
    commits = [in_step(fleet, participants, numel) for _ in range(rounds)]
    assert all(each.averaged for commit in commits for each in commit.answers)
    planned = forecast(fleet.config, 60.0, numel).bytes_down
    assert planned is not None and fleet.engine.bytes_down == pytest.approx(rounds * planned, rel=0.01)
    rows = NewRows(RunLog(fleet.store)).read()
    assert [row.bytes_down for row in rows] == [pytest.approx(planned, rel=0.001)] * rounds


@pytest.mark.parametrize(("codec", "passes"), [("int4", "int4"), ("2bit", "int8"), ("fp32", None)])
def test_the_average_passes_through_the_codec_that_the_commit_names(codec, passes):
    """Codecs that need error feedback leave averages to the one for fine parameters: nobody keeps what is lost."""
    fleet, participants = fleet_of("scatter_reduce", codec=codec)
    commit = played(participants)
    assert commit.average_codec == passes
    numel = participants[0].base.shard_numel
    sizes = [info.size for info in fleet.store.list(keys.reduced_shards(1)) if keys.parse_reduced_shard(info.key)]
    assert sizes.count(get_codec(passes or "fp32").encoded_size(numel)) == of_shards(participants) - 1
    assert_right(fleet, participants)


def rewritten(fleet: Fleet, participants: list[Participant], **changes: object) -> list[Participant]:
    """The replicas that close round 1 by replica 0's commit after it was changed: all others."""
    for each in participants:
        contribute(each)
    for each in participants[1:]:
        each._closer._observe(waited=False)  # reads and reports what is dealt to it
    honest = close(participants[0]).commit
    fleet.engine.put(keys.commit(1), honest.model_copy(update=changes).to_bytes())
    together([lambda each=each: each.close() for each in participants[1:]])  # type: ignore[misc]
    return participants[1:]


def test_a_commit_of_an_earlier_version_names_no_codec_and_its_average_is_fp32():
    fleet, participants = fleet_of("scatter_reduce", codec="int4")
    others = rewritten(fleet, participants, average_codec=None)
    assert b"average_codec" not in fleet.engine.get(keys.commit(1))
    assert_right(fleet, others)
    assert others[0].digest != participants[0].digest  # whose commit named int4


@pytest.mark.parametrize(("path", "named"), [("scatter_reduce", "2bit"), ("scatter_reduce", "in4"), ("gather", "int4")])
def test_a_commit_that_names_another_codec_than_the_settings_give_averages_nobody(path, named):
    fleet, participants = fleet_of(path, codec="int4")
    for each in rewritten(fleet, participants, average_codec=named):
        last = each._tip.value.last
        assert last is not None and f"its codec of the average is {named}" in last.void
        assert not last.commit.decided_about()


def test_what_auto_took_is_fixed_by_the_start_record():
    """A version that foretells other times goes on with the path and the shards that the run began with."""
    fleet, participants = fleet_of("auto", codec="int4", wide=32, link=ASSUMED)
    start = RunLog(fleet.store).start()
    assert start is not None and start.record.path == "gather" and not scatters(fleet.config, start.record)
    other = start.record.model_copy(update={"path": "scatter_reduce"})
    before = start.record.model_copy(update={"path": None})
    assert scatters(fleet.config, other) and not scatters(fleet.config, before)
    assert scatters(fleet.config, before.model_copy(update={"shard_numel": 4096}))
    assert played(participants).checks is None
    assert_right(fleet, participants)
    assert fleet_of("gather")[0].engine.get(keys.START).count(b'"path"') == 0


def test_fewer_shards_than_replicas_are_averaged_too():
    fleet, participants = fleet_of("scatter_reduce", wide=32, replicas=5)
    commit = played(participants)
    assert all(each.averaged for each in commit.answers) and commit.checks and of_shards(participants) == 2
    assert_right(fleet, participants)


def test_all_replicas_go_by_the_link_that_is_recorded():
    thin, far = Link(1e-4, 1e4, 1e4), Link(0.1, 1e9, 1e9)
    for link, path in ((thin, "scatter_reduce"), (far, "gather")):
        fleet, participants = fleet_of("auto", link=link, codec="int4", replicas=8)
        start = RunLog(fleet.store).start()
        assert start is not None and start.record.path == path and len(participants) == 8
        assert not list(fleet.store.list(keys.PROBE))


BAD_RECORDS = {
    "truncated": lambda data: data[: len(data) // 2],
    "garbage": lambda data: b"\x00\xff garbage",
    "another claim": lambda data: json.dumps({**json.loads(data), "claim_sha256": "0" * 64}).encode(),
    "another leg": lambda data: json.dumps({**json.loads(data), "leg": 2}).encode(),
    "negative shard": lambda data: data.replace(b'"good":[', b'"good":[-1,'),
}


@pytest.mark.parametrize("what", BAD_RECORDS)
def test_a_check_record_that_cannot_count_costs_reading_and_nothing_else(what, caplog):
    fleet, participants = fleet_of("scatter_reduce")
    fleet.engine.change = lambda key, data: BAD_RECORDS[what](data) if "checked/1." in key else data
    commit = played(participants)
    assert all(each.averaged for each in commit.answers)
    assert "a check record of replica 1 does not count" in caplog.text
    assert_right(fleet, participants)


def lying(key: str, data: bytes, good: bool) -> bytes:
    """Records of replica 1 find every shard good, or every shard bad."""
    if "checked/1." not in key:
        return data
    body = json.loads(data)
    for each in body["read"]:
        each["good"], each["bad"] = ([*each["good"], *each["bad"]], []) if good else ([], [*each["good"], *each["bad"]])
    return json.dumps(body).encode()


def test_one_replica_that_calls_every_shard_bad_keeps_nobody_out():
    fleet, participants = fleet_of("scatter_reduce")
    fleet.engine.change = lambda key, data: lying(key, data, good=False)
    commit = played(participants)
    assert [each.kind for each in commit.answers] == ["delta"] * REPLICAS
    assert_right(fleet, participants)


def test_verify_finds_a_commit_that_bars_a_dealer_whom_no_check_contradicts():
    fleet, participants = fleet_of("scatter_reduce")
    commit = played(participants)
    fleet.engine.put(keys.commit(1), commit.model_copy(update={"barred": (2,)}).to_bytes())
    found = verify_run(fleet.store).disagreement
    assert found is not None and found.key == keys.commit(1)
    assert found.words == "is void: its list of who is barred is (2,); () follows"


def test_one_replica_that_vouches_for_a_damaged_payload_gets_it_averaged_by_nobody():
    fleet, participants = fleet_of("scatter_reduce")

    def change(key: str, data: bytes) -> bytes:
        payload = keys.parse_payload(key)
        rotten = payload is not None and payload.replica_id == 2 and payload.take == 1
        return data[:-1] + bytes([data[-1] ^ 1]) if rotten else lying(key, data, good=True)

    fleet.engine.change = change
    commit = played(participants)
    kinds = {each.replica_id: (each.kind, each.averaged) for each in commit.answers}
    assert 2 not in kinds or kinds[2] == ("unverifiable", False)
    assert all(kinds[i] == ("delta", True) for i in (0, 1, 3))
    assert_right(fleet, participants)


def test_strangers_that_vouch_for_a_damaged_payload_of_another_get_it_averaged_by_nobody():
    """Where nobody scores their work, three of seven ended a run: who commits went by the words of any two."""
    strangers = [4, 5, 6]
    fleet, participants = fleet_of("scatter_reduce", replicas=7, invited=strangers, aggregate="mean")
    manifests = [contribute(each) for each in participants]
    damaged = keys.payload(
        1, 6, 1, next(i for i in range(9) if 0 not in Dealing(1, 7, frozenset(range(4))).readers(6, i))
    )
    fleet.engine.put(damaged, fleet.store.get(damaged)[:-1] + b"!")
    read = tuple(
        ReadShards(manifest_sha256=sha256_hex(each.to_bytes()), good=tuple(range(len(each.payload.shards))))
        for each in manifests
        if each.payload is not None
    )
    for attempt in (participants[i]._attempt for i in strangers):
        about = {"replica_id": attempt.replica_id, "attempt": 1, "claim_sha256": attempt.claim_sha256}
        assert attempt.writer.create(Checked(**attempt.stamp(), round=1, leg=1, number=1, read=read, **about))
    closers = [each._closer for each in participants]
    closers[0]._observe(waited=False)
    before = {each.replica_id for each in closers[0]._decide()[2]}
    commit = together([lambda each=each: close(each) for each in participants[:4]])[0].commit  # type: ignore[misc]
    assert {each.replica_id: each.averaged for each in commit.answers}[6] is False
    assert before.isdisjoint(strangers)
    assert_right(fleet, participants[:4])


def test_a_reduced_shard_that_differs_from_its_inputs_decides_nothing():
    fleet, participants = fleet_of("scatter_reduce")
    fleet.engine.change = lambda key, data: data[:-1] + b"!" if keys.parse_reduced_shard(key) else data
    played(participants)
    assert_right(fleet, participants)


def test_a_replica_that_publishes_wrong_averages_decides_nothing(caplog):
    fleet, participants = fleet_of("scatter_reduce")

    told: dict[int, str] = {}  # digests of the wrong averages that replica 1 writes as an owner

    def change(key: str, data: bytes) -> bytes:
        if (found := keys.parse_reduced_shard(key)) is not None and dealers(1, found[1], REPLICAS)[0] == 1:
            data = data[:-1] + bytes([data[-1] ^ 1])
            told[found[1]] = bulk_digest(data)
        if key != keys.reduced(1, 1):
            return data
        record = Reduced.from_bytes(data, key)
        wrong = (each.model_copy(update={"digest": told.get(each.shard, each.digest)}) for each in record.shards)
        return record.model_copy(update={"shards": tuple(wrong)}).to_bytes()

    fleet.engine.change = change
    played(participants)
    assert_right(fleet, participants)
    assert "rank 1 published an average of shard" in caplog.text


PAIR = (1, 2)


def in_step(fleet: Fleet, participants: list[Participant], numel: int = WIDE * HIGH + HIGH) -> Commit:
    """The next round's commit, after all have contributed what they found when they looked, and closed it."""
    for each in participants:
        generator = torch.Generator().manual_seed(each._attempt.replica_id)
        vector = FlatTensors([torch.randn(numel, generator=generator)])
        each.publish(lambda vector=vector: vector, report())  # type: ignore[misc]
    return together([lambda each=each: close(each) for each in participants])[0].commit  # type: ignore[misc]


def pair_lies(key: str, data: bytes) -> bytes:
    """What two replicas write who publish one false average of each shard that both deal, and who deny it."""
    made = keys.parse_reduced_shard(key)
    if made is not None and set(dealers(made[0], made[1], 5)) == set(PAIR):
        return FALSE
    parsed = keys.reduced.parse(key)
    if parsed is not None and parsed[1] in PAIR:
        record = Reduced.from_bytes(data, key)
        false = bulk_digest(FALSE)
        told = [
            each.model_copy(update={"digest": false}) if set(dealers(parsed[0], each.shard, 5)) == set(PAIR) else each
            for each in record.shards
        ]
        return record.model_copy(update={"shards": tuple(told)}).to_bytes()
    if any(f"checked/{liar}." in key for liar in PAIR) and b'"averages"' in data:
        return data.replace(b'"false":true', b'"false":false')
    return data


def test_two_dealers_that_publish_one_false_average_are_found_out_and_deal_no_more(caplog):
    """Whoever draws the shard tells the others, who rebuild, and contribute nothing trained from the false base."""
    fleet, participants = fleet_of("scatter_reduce", clock=SystemClock(), replicas=5, rounds=20)
    fleet.engine.change = pair_lies
    honest = [each for each in participants if each._attempt.replica_id not in PAIR]
    commits = []
    while not (commits and commits[-1].barred) and len(commits) < 12:
        commits.append(in_step(fleet, participants))
    assert commits[-1].barred == PAIR and len(commits) > 1
    assert {each.kind for each in commits[-1].answers} == {"delta", "abstention"}  # of rebuilt bases, all of them
    fleet.engine.change = lambda _, data: data  # they deal nothing any more
    assert "published an average of shard" in caplog.text
    after = in_step(fleet, participants)
    assert after.barred == PAIR and all(each.averaged for each in after.answers)
    assert not {keys.reduced(after.round, liar) for liar in PAIR} & {info.key for info in fleet.store.list("rounds/")}
    assert_right(fleet, honest)


def test_what_was_found_is_reported_again_after_a_void_commit():
    """The pair publishes no other false average once it is accused, in a round whose commit is void."""
    fleet, participants = fleet_of("scatter_reduce", clock=SystemClock(), replicas=5, rounds=20)
    fleet.engine.change = pair_lies

    def is_accused(round_: int) -> bool:
        return any(b'"false":true' in fleet.engine.get(info.key) for info in fleet.store.list(keys.checks(round_)))

    opened = 1
    while not is_accused(opened) and opened < 12:
        in_step(fleet, participants)
        opened += 1
    fleet.engine.change = lambda _, data: data
    fleet.engine.put(keys.commit(opened), b"no commit")
    assert not in_step(fleet, participants).applied
    assert in_step(fleet, participants).barred == PAIR


def test_one_replica_that_accuses_another_of_a_right_average_bars_itself_alone():
    """The others average that shard from the payloads, and all but the accuser report the average as right."""
    fleet, participants = fleet_of("scatter_reduce", clock=SystemClock(), replicas=5, rounds=20)
    in_step(fleet, participants)
    accused = Reduced.from_bytes(fleet.engine.get(keys.reduced(1, 3)), "a record")
    average = {"round": 1, "shard": accused.shards[0].shard, "replicas": (3,), "digest": accused.shards[0].digest}
    word = AverageCheck(average=PublishedAverage.model_validate(average), false=True)

    def change(key: str, data: bytes) -> bytes:
        if "checked/1." not in key:
            return data
        return Checked.from_bytes(data, key).model_copy(update={"averages": (word,)}).to_bytes()

    fleet.engine.change = change
    commits = [in_step(fleet, participants)]
    while not commits[-1].barred and len(commits) < 8:
        commits.append(in_step(fleet, participants))
    assert commits[-1].barred == (1,)
    assert {each.kind for commit in commits for each in commit.answers} == {"delta"}
    assert_right(fleet, participants)


def test_replicas_that_die_after_they_contributed_are_read_and_averaged_for():
    """Replica 3 reads nothing and averages nothing."""
    fleet, participants = fleet_of("scatter_reduce")
    for each in participants:
        contribute(each)
    commits = together([lambda each=each: close(each) for each in participants[:3]])  # type: ignore[misc]
    assert [a.replica_id for a in commits[0].commit.answers if a.averaged] == [0, 1, 2, 3]
    assert_right(fleet, participants[:3])


def without_readers_of(fleet: Fleet, commit: Commit, author: int, shards: int) -> tuple[CheckNamed, ...]:
    """The check records that a commit names, written anew: only the author finds its own payload shards good."""
    own = next(each.manifest_sha256 for each in commit.answers if each.replica_id == author)
    changed = []
    for named in commit.checks or ():
        key = keys.checked(commit.round, named.replica_id, named.number)
        record = Checked.from_bytes(fleet.engine.get(key), key)
        read = tuple(each for each in record.read if each.manifest_sha256 != own)
        if named.replica_id == author:
            read += (ReadShards(manifest_sha256=own, good=tuple(range(shards))),)
        data = record.model_copy(update={"read": read}).to_bytes()
        fleet.engine.put(key, data)
        changed.append(named.model_copy(update={"sha256": sha256_hex(data)}))
    return tuple(changed)


@pytest.mark.parametrize("vouches", [False, True], ids=["no records", "only the author has read its own payload"])
def test_a_commit_of_what_nobody_but_its_author_has_read_averages_nobody(vouches):
    """One liar commits its own unreadable payload beside others': in a gather such a run ends with PayloadCorrupt."""
    fleet, participants = fleet_of("scatter_reduce")
    for each in participants:
        contribute(each)
    for each in participants[1:]:
        each._closer._observe(waited=False)  # reads and reports what is dealt to it
    honest = close(participants[0]).commit
    assert {each.replica_id for each in honest.checks or ()} == set(range(REPLICAS))
    kept = without_readers_of(fleet, honest, 0, of_shards(participants)) if vouches else ()
    fleet.engine.put(keys.commit(1), honest.model_copy(update={"checks": kept}).to_bytes())
    for index in range(of_shards(participants)):
        fleet.engine.put(keys.payload(1, 0, 1, index), b"junk")
    for each in participants[1:]:
        each.close()
        last = each._tip.value.last
        assert last is not None and "nobody else has found good" in last.void
        assert not last.commit.decided_about() and last.commit.empty_rounds == 1
    assert len({each.digest for each in participants[1:]}) == 1


def test_dealers_of_a_contribution_are_never_its_author_and_few_dealers_make_a_gather():
    three, five, eight = (make_config({"entrypoint": "m:f", "replicas": count}) for count in (3, 5, 8))
    dealing = dealing_of(3, five, [0, 1, 3, 4])
    assert dealing == Dealing(3, 5, frozenset({0, 1, 3, 4}))
    for author in range(5):
        for shard in range(7):
            readers = dealing.readers(author, shard)
            assert len(set(readers)) == 2 and author not in readers
            assert set(readers) == set(dealing.averagers(shard)) or author in dealing.averagers(shard)
    assert dealing_of(3, five, [0, 1]) is None and dealing_of(3, eight, [0, 1, 2, 3]) is None
    assert dealing_of(3, three, [0, 1]) is None and dealing_of(3, three, [0, 1, 2]) is not None
    growing = make_config({"entrypoint": "m:f", "replicas": 4, "max_replicas": 16, "quorum": None})
    assert dealing_of(3, growing, [0, 9, 14]) == Dealing(3, 16, frozenset({0, 9, 14}))


def test_auto_takes_the_predicted_faster_path_and_says_both(caplog):
    caplog.set_level("INFO")
    config = {"entrypoint": "m:f", "replicas": 8, "path": "auto"}
    paths = [path_of(make_config(config), [numel]) for numel in (25_000_000, 1000)]
    assert paths == ["scatter_reduce", "gather"]
    assert caplog.text.count("s by gather") == 2 and "by scatter_reduce, at 50 ms" in caplog.text
    assert path_of(make_config({**config, "adapters": "exact"}), [25_000_000]) == "gather"
    assert path_of(make_config({**config, "replicas": 2, "path": "scatter_reduce"}), [25_000_000]) == "gather"
    with pytest.raises(ConfigError, match="the mean of products needs every payload"):
        make_config({**config, "path": "scatter_reduce", "adapters": "exact"})
