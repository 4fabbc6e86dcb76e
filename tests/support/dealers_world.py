"""The bucket, log and processes in the model of rounds by scatter-reduce, and the rules that can be left out of it.

`dealers_model` has a replica that follows the rules or lies, `dealers_checks` the fleets and what must hold.
"""

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b
from itertools import count
from typing import Any

RULES = {
    "agreed": "the commit before names the path of a round",
    "log": "the dealers of a round follow from the commit before, not from what a replica has seen",
    "deputy": "where the author of a contribution deals a shard, the next dealer reads it in its place",
    "other": "the word of a contribution's author about it does not count",
    "both": "until the deadline the words of both readers of a shard are waited for",
    "dispute": "a shard that one dealer found good and another bad counts by the reading of who decides",
    "read": "who decides reads disputed shards; it does not take them for bad",
    "silent": "who decides reads at the deadline what silent dealers have not, and says so before the commit",
    "takes": "a dealer that has read more writes one more check record",
    "alone": "a contribution of the decider that nobody else has read is late, unless the commit averages nothing else",
    "borne": "a commit that averages what no other than its author found good, by records that it names, is void",
    "inputs": "the owner averages what the commit names, not what it has received",
    "answered": "the averages are dealt among those who answered the round",
    "agree": "a reduced shard is used where the words of owner and checker agree with its bytes",
    "payloads": "otherwise, or without their words at the deadline, a shard is averaged from the payloads",
    "passed": "an average passes through the codec of reduced shards wherever it is made, in rebuilds too",
    "draw": "everybody averages one more shard of each round from the payloads, of its own drawing",
    "secret": "nobody can foretell which",
    "told": "who finds that replicas published a false average says so in a check record of the next round",
    "again": "until a commit that counts names the record in which it says so, it says so again in every round",
    "most": "who is accused by more than half of the replicas that may deal deals no more in the leg",
    "tried": "who hears an accusation averages that shard itself, and says what it found",
    "denied": "whom so many contradict as accuser deals no more either",
    "rebuild": "who finds an accusation of owner and checker true rebuilds its base from payloads",
    "before": "it listens before it contributes, and contributes nothing that it trained from a false base",
    "named": "who found one true names its own rebuilt base as decider, not that of most manifests",
    "distrust": "it uses no reduced shard of the accused any more",
    "search": "who rebuilds a base that others contradict averages all shards since its snapshot, and accuses",
    "snap": "who writes a snapshot rebuilds its base first, if it used reduced shards",
}
ALL = frozenset(RULES)
TRAIN_S, DEADLINE_S, REDUCE_S, POLL_S = 100.0, 160.0, 20.0, 2.0
LASTS_S = 8_000.0  # of model time until a schedule counts as one that never ends

Steps = Generator[float, None, Any]  # seconds until the next line; a process may die at each
Key = tuple[Any, ...]
Base = tuple[str, ...]  # one symbol for each shard
Word = tuple[int, int, tuple[int, ...], str]  # round and shard of an average, who published it, its digest


class Broken(Exception):
    """Something that must hold does not."""


class Unreadable(Exception):
    """A commit averages a payload shard whose bytes are not those of its manifest: the run ends (`PayloadCorrupt`)."""


def digest(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=5).hexdigest()


@dataclass(frozen=True)
class Scenario:
    replicas: int = 4
    rounds: int = 6
    quorum: int = 2
    crash: float = 0.0  # chance of a death at each line, at most three a replica
    speeds: tuple[float, ...] = ()  # of training, by replica
    slow: float = 0.0  # chance that a replica does nothing for long before it reads or averages
    rot: float = 0.0  # chance that a shard of an honest payload is not what its manifest says
    liars: tuple[int, ...] = ()
    deeds: frozenset[str] = frozenset()  # good, bad, mute, sum, bytes, rot, grab, accuse, derived
    mixed: bool = False  # whether rounds change between gather and scatter
    snapshot_every: int = 2


@dataclass(frozen=True)
class Manifest:
    digests: tuple[str, ...]
    claim: str
    abstains: bool  # with a base that was rebuilt after the training
    fresh: frozenset[Key]  # units of work of this round
    units: frozenset[Key]  # and of those before that it carries
    dropped: frozenset[Key]


@dataclass(frozen=True)
class Commit:
    by: int
    named: tuple[int, ...]
    answered: tuple[int, ...]
    claim: str | None
    checks: tuple[Key, ...]
    roster: tuple[int, ...]
    barred: tuple[int, ...]
    path: str  # of the next round


@dataclass(frozen=True)
class State:
    """What the log says of the next round."""

    roster: tuple[int, ...]
    barred: tuple[int, ...]
    path: str

    @cached_property
    def dealers(self) -> tuple[int, ...]:
        return tuple(i for i in self.roster if i not in self.barred)


@cache
def dealt_to(
    round_: int, shard: int, replicas: int, dealers: tuple[int, ...], but: int | None = None
) -> tuple[int, ...]:
    """Owner and checker of a shard: the first two dealers from a place that moves on with round and shard.

    `but`: the author of a contribution, in whose place the next dealer reads.
    """
    among, order = set(dealers) - {but}, ((round_ + shard + step) % replicas for step in range(replicas))
    return tuple(i for i in order if i in among)[:2]


class World:
    """The bucket, the processes and the clock of one schedule, and what an onlooker knows of it."""

    def __init__(
        self, scenario: Scenario, seed: int, rules: frozenset[str], attempt: Callable[["World", int, int], Steps]
    ) -> None:
        self.scenario, self.rules, self.rng, self._attempt = scenario, rules, random.Random(seed), attempt
        self.store: dict[Key, Any] = {}
        self._keys: dict[Key, list[Key]] = defaultdict(list)  # (kind, round) -> keys
        self._truths = [("start",) * scenario.replicas]
        self.now, self.story = 0.0, list[str]()
        self._queue: list[tuple[float, int, int, int, Steps]] = []
        self._serial, self._deaths = count(), Counter[int]()
        self.attempts = Counter[int]()
        self._states: dict[int, State] = {0: State(self.everyone, (), "scatter")}
        # what an onlooker knows
        self.readers: dict[Key, set[int]] = defaultdict(set)  # who read (round, author, shard)
        self.stepped: dict[int, dict[int, Base]] = defaultdict(dict)  # round -> replica -> base
        self.ended: dict[int, str] = {}
        self.stood_in = 0  # times that somebody read for a silent dealer, or averaged for a silent owner
        self.vain = Counter[int]()  # averages made again for the sake of false accusations, by replica
        self.contradicted = Counter[int]()  # rebuilds because of reduced shards, by replica
        self.awaited = set[int]()  # replicas whose averages somebody waited for in vain

    @cached_property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.scenario.replicas))

    # -- the bucket ----------------------------------------------------------------------------------------------

    def create(self, key: Key, value: Any) -> bool:
        if key in self.store:
            return False
        self.store[key] = value
        self._keys[key[:2]].append(key)
        return True

    def keys(self, kind: str, round_: int) -> list[Key]:
        return sorted(self._keys[kind, round_])

    def manifests(self, round_: int) -> dict[int, Manifest]:
        return {key[2]: self.store[key] for key in self.keys("manifest", round_)}

    def is_right(self, round_: int, author: int, shard: int) -> bool:
        """Whether the bytes of a payload shard are those of its manifest."""
        return digest(self.store["payload", round_, author, shard]) == self._promised(round_, author, shard)

    def _promised(self, round_: int, author: int, shard: int) -> str:
        manifest: Manifest = self.store["manifest", round_, author]
        return manifest.digests[shard]

    # -- the log -------------------------------------------------------------------------------------------------

    def commit(self, round_: int) -> Commit | None:
        return self.store.get(("commit", round_))

    def last_round(self) -> int:
        return next(r for r in count(1) if ("commit", r) not in self.store) - 1

    def state(self, round_: int) -> State:
        """What the log up to the commit of a round says of the next round."""
        if round_ not in self._states:
            commit, before = self.store["commit", round_], self.state(round_ - 1)
            void = bool(self.why_void(round_))
            self._states[round_] = (
                State(self.everyone, before.barred, before.path)
                if void
                else State(commit.roster, commit.barred, commit.path)
            )
        return self._states[round_]

    def scatters(self, state: State) -> bool:
        """Whether a round is by scatter-reduce: where half of the replicas or fewer may deal, it is a gather."""
        return state.path == "scatter" and len(state.dealers) > max(1, self.scenario.replicas // 2)

    def barred_by(self, round_: int, checks: Iterable[Key]) -> tuple[int, ...]:
        """Who deals no more after a round, by what the check records say that its commit names."""
        before = self.state(round_ - 1)
        voters = set(before.roster) - set(before.barred)
        said: dict[Word, dict[bool, set[int]]] = defaultdict(lambda: {True: set(), False: set()})
        for key in checks:
            for word, false in self.store[key][2]:
                said[word][false] |= {key[2]} & voters
        needed = len(voters) // 2 + 1 if "most" in self.rules else 1
        barred = set(before.barred)
        for word, by in said.items():
            barred |= set(word[2]) if len(by[True]) >= needed else set()
            barred |= by[True] if len(by[False]) >= needed and "denied" in self.rules else set()
        return tuple(sorted(barred))

    def why_void(self, round_: int) -> str:
        """Why a commit counts for nobody, from the log and the records that it names; empty if it counts."""
        commit, before = self.store["commit", round_], self.state(round_ - 1)
        if commit.barred != self.barred_by(round_, commit.checks):
            return "other dealers are barred than follow from its records"
        if not self.scatters(before) or commit.named == (commit.by,) or "borne" not in self.rules:
            return ""
        found = {
            (author, shard)
            for key in commit.checks
            for author, shard in self.store[key][0]
            if key[2] not in (author, *before.barred)
        }
        shards = ((author, shard) for author in commit.named for shard in self.everyone)
        return next((f"nobody else found {each} good" for each in shards if each not in found), "")

    def inputs(self, round_: int) -> tuple[int, ...]:
        """Whom a round averages; empty if it averages nobody."""
        return () if self.why_void(round_) else self.store["commit", round_].named

    def average(self, round_: int, shard: int, named: Iterable[int], rebuilds: bool = False) -> str:
        """The average of a shard, from payloads, as its reduced shard decodes. Raises `Unreadable`."""
        for author in named:
            if not self.is_right(round_, author, shard):
                raise Unreadable(f"shard {shard} of replica {author} in round {round_}")
        mean = digest("mean", tuple((i, self._promised(round_, i, shard)) for i in sorted(named)))
        return mean if rebuilds and "passed" not in self.rules else digest("decoded", mean)

    def after(self, base: Base, round_: int) -> Base:
        """The base after a round, from the base before it and payloads. Raises `Unreadable`."""
        named = self.inputs(round_)
        if not named:
            return base
        return tuple(digest(each, self.average(round_, k, named, rebuilds=True)) for k, each in enumerate(base))

    def truth(self, round_: int) -> Base:
        """The base that the log gives. Raises `Unreadable`."""
        while len(self._truths) <= round_:
            self._truths.append(self.after(self._truths[-1], len(self._truths)))
        return self._truths[round_]

    # -- running -------------------------------------------------------------------------------------------------

    def say(self, *words: object) -> None:
        self.story.append(" ".join([f"{self.now:8.1f} ", *map(str, words)]))

    def _push(self, delay: float, replica: int, attempt: int, steps: Steps) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._serial), replica, attempt, steps))

    def launch(self, replica: int, delay: float) -> None:
        self.attempts[replica] += 1
        attempt = self.attempts[replica]
        self._push(delay, replica, attempt, self._attempt(self, replica, attempt))

    def run(self) -> "World":
        for i in self.everyone:
            self.launch(i, self.rng.random() * 5)
        while self._queue and self.now < LASTS_S:
            self.now, _, replica, attempt, steps = heapq.heappop(self._queue)
            if self._deaths[replica] < 3 and self.rng.random() < self.scenario.crash:
                self._deaths[replica] += 1
                self.launch(replica, self.rng.uniform(10, 60))
                lives_on = self.rng.random() < 0.3  # for a while, beside its successor
                self.say("replica", replica, "dies" if not lives_on else "is followed too early")
                if not lives_on:
                    continue
            try:
                self._push(next(steps), replica, attempt, steps)
            except StopIteration as end:
                if end.value != "superseded":
                    self.ended[replica] = end.value
            except Unreadable as error:
                self.ended[replica] = "unreadable"
                self.say("replica", replica, "cannot read", error)
        return self
