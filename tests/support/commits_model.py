"""A model of void commits in signed runs: who holds one replica's key makes at most one leg fail, and stops no reader.

Seeded random schedules of honest replicas, a coordinator, and one insider, who may write any commit in its own name,
also ahead of the log. The bucket is create-only, but in schedules with `overwrites`. `run_log` reads logs, and
`supervision.rotation` keeps authors from committing; the model has their rules and nothing else of them, so that each
can be left out (`play(seed, without=...)`) and the schedule be seen that breaks then.

`play(seed, instead="pass over")` has a rule that runs do not have: a void commit ends no round, and the next name of
the round is read. It breaks by readers that do not read manifests.
"""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

RULES = {
    "own": "what its author alone continues is no evidence that the log was changed, and is void like any other",
    "unnamed": "neither is an unlinked commit after a void one",
    "evidence": "an unlinked commit that another replica has continued as it is written shows a log that was changed",
    "schema": "a commit of another schema than run.json's does not exist",
    "barred": "after a leg that failed by void commits their authors commit nothing",
    "in all": "the same after three void ones of one author in a leg, though not in a row",
    "somebody": "never is every replica kept from committing",
    "result": "a result that the last commit contradicts makes a reader check every verdict",
    "failed": "who begins a leg after one that failed has checked every verdict",
    "stop": "after a leg's stop no commit is of the log until another leg begins",
    "judge": "a coordinator writes down which commits name what is not there, while a replica waits for that",
    "abstain": "before, it takes the names of what is missing, so that nobody can bring that later",
    "judged end": "it judges the newest commits before it believes that a replica has stopped the leg",
    "judged stop": "and before it commits a stop itself, after which it judges none",
    "newest": "before the coordinator commits a stop it checks the verdicts of as many commits as may be void in a row",
}
REPLICAS, STEPS, IN_A_ROW, MOST = 3, 4, 3, 400
INSIDER = 2
COORDINATOR = -2


class Broken(Exception):
    """A schedule broke a promise: the words say which."""


class Waits(Exception):
    """A reader that checks verdicts cannot check a commit, because what it names is not there."""


class Changed(Exception):
    """A reader raises: the log was changed after it was written, or its next commit cannot be read."""


@dataclass(frozen=True)
class Commit:
    number: int  # stands for its digest
    round: int
    leg: int
    previous: int
    step: int  # outer steps after it
    by: int
    stop: str = ""
    false: bool = False  # says other than the manifests that it names, so that who reads those finds it void
    later: bool = False  # is of a later schema
    absent: bool = False  # names what is not there, and is right if its author brings it later


@dataclass(frozen=True)
class Read:
    """A commit as a reader takes it, with the state after it."""

    commit: Commit
    void: bool
    unlinked: bool
    step: int
    empty: int
    stop: str


@dataclass
class World:
    rng: random.Random
    without: str
    instead: str
    odd: frozenset[int]  # honest replicas whose first commit is void, as by a wrong bit
    stored: dict[int, list[Commit]] = field(default_factory=dict)  # by round: of its names in turn
    begins: list[tuple[int, int, int, frozenset[int]]] = field(default_factory=list)  # round and digest, step, barred
    results: dict[int, tuple[str, int]] = field(default_factory=dict)  # by leg, of replicas that ended with it
    brought: set[int] = field(default_factory=set)  # numbers of absent commits, so below; what they name is there now
    taken: set[int] = field(default_factory=set)  # nobody can bring what they name
    unfounded: set[int] = field(default_factory=set)  # as a coordinator wrote down
    planned: tuple[int, int, int, frozenset[int]] | None = None  # a leg whose begin is about to be written
    number: int = 0
    waits: bool = False  # whether the reader of this moment is a replica, which acts on verdicts

    def has(self, rule: str) -> bool:
        return rule != self.without

    # -- reading ------------------------------------------------------------------------------------------------------

    def exists(self, commit: Commit) -> bool:
        barred = [each[3] for each in self.begins if each[0] < commit.round][-1]
        return commit.by not in barred and not (commit.later and self.has("schema"))

    def takes(self, round_: int) -> list[Commit]:
        return [each for each in self.stored.get(round_, []) if self.exists(each)]

    def log(self, derives: bool, waits: bool = False) -> list[Read]:
        """The log as a reader takes it that reads manifests, or as one that does so only once it is contradicted.

        `waits`: raise `Waits` for one that cannot be checked, which others take as it is written.
        """
        self.waits = waits
        try:
            return self._log(derives)
        except RuntimeError:
            return self._log(derives=True)
        finally:
            self.waits = False

    def _log(self, derives: bool) -> list[Read]:
        found: list[Read] = []
        while True:
            leg = self.leg_of(found)
            if found and found[-1].stop and self.begins[leg - 1][0] != len(found) and self.has("stop"):
                if self.takes(len(found) + 1) and not derives:
                    raise RuntimeError("all verdicts are to be checked")
                return found
            read = None
            for commit in self.takes(len(found) + 1):
                read = self._read(commit, found, leg, derives)
                if not (read.void and self.instead == "pass over"):
                    break
                read = None
            if read is None:
                return found
            found.append(read)

    def leg_of(self, found: list[Read]) -> int:
        """The leg of the next commit, from 1: one that begins after a commit which was read otherwise has not begun."""
        leg = 0
        for after, number, _, _ in self.begins:
            if after > len(found) or (after and found[after - 1].commit.number != number):
                break
            leg += 1
        return leg

    def _read(self, commit: Commit, found: list[Read], leg: int, derives: bool) -> Read:
        if commit.later:
            raise Changed("a commit of a later schema")
        before = found[-1] if found else Read(Commit(0, 0, 0, 0, 0, -1), False, False, 0, 0, "")
        begins = self.begins[leg - 1][0] == len(found)
        step, empty, stop = (self.begins[leg - 1][2], 0, "") if begins else (before.step, before.empty, before.stop)
        others = before.commit.by != commit.by if self.has("own") else True
        evidence = others and self.has("evidence")
        unlinked = commit.previous != before.commit.number
        if unlinked and before.void and not self.has("unnamed"):
            raise Changed("it does not name the void commit before it")
        wrong = unlinked or bool(stop) or commit.leg != leg
        if commit.by == COORDINATOR:
            wrong |= commit.step != step
        else:
            wrong |= commit.step != min(step + 1, STEPS) or (commit.stop == "completed") != (step == STEPS)
        if wrong and not unlinked and not derives and self.instead != "pass over":
            raise RuntimeError("all verdicts are to be checked")
        if wrong and not unlinked and before.unlinked and evidence:
            raise Changed("its author took an unlinked commit as it is written")
        is_absent = derives and not wrong and commit.absent and commit.number not in self.brought
        if is_absent and self.waits and commit.number not in self.unfounded:
            raise Waits(commit.round)
        if wrong or (derives and commit.false) or (is_absent and commit.number in self.unfounded):
            return Read(commit, True, unlinked, step, empty + 1, stop or ("failed" if empty + 1 >= IN_A_ROW else ""))
        empty = 0 if commit.step > step or commit.stop == "completed" else empty + 1
        return Read(commit, False, False, commit.step, empty, commit.stop or ("failed" if empty >= IN_A_ROW else ""))

    # -- moves --------------------------------------------------------------------------------------------------------

    def next(self, found: list[Read], by: int) -> Commit:
        """The commit that who reads `found` writes next."""
        self.number += 1
        leg, last = self.leg_of(found), found[-1] if found else None
        step = last.step if last is not None and self.begins[leg - 1][0] != len(found) else self.begins[leg - 1][2]
        stop = "completed" if step == STEPS else ""
        previous = last.commit.number if last else 0
        return Commit(self.number, len(found) + 1, leg, previous, min(step + 1, STEPS), by, stop)

    def create(self, commit: Commit) -> None:
        """Under the first name of the round that no record has; who finds one there has lost."""
        takes = self.takes(commit.round)
        void = [each.commit for each in self.log(derives=True) if each.void]
        if not takes or (self.instead == "pass over" and all(each in void or self._is_void(each) for each in takes)):
            self.stored.setdefault(commit.round, []).append(commit)

    def _is_void(self, commit: Commit) -> bool:
        found = self.log(derives=True)
        at = len(found) + 1
        return commit.round == at and self._read(commit, found, self.leg_of(found), derives=True).void

    def honest(self, by: int, halt: bool) -> None:
        try:
            found = self.log(derives=True, waits=True)
        except Waits:
            return
        leg = self.leg_of(found)
        if found and self.begins[leg - 1][0] != len(found) and found[-1].stop:
            self.results.setdefault(leg, (found[-1].stop, found[-1].commit.number))
            return
        commit = self.next(found, by)
        if by in self.odd:
            commit, self.odd = replace(commit, false=True), self.odd - {by}
        elif halt and not commit.stop:
            commit = replace(commit, stop="halted")
        if self.exists(commit):
            self.create(commit)

    def forge(self) -> None:
        """Something that the insider can write: it reads everything, and its own commits can follow each other."""
        found = self.log(derives=self.rng.random() < 0.5)
        own = self.next(found, INSIDER)
        match self.rng.randrange(9):
            case 0:  # ahead of the log, which nobody can link to what is not there yet
                for round_ in range(own.round, own.round + self.rng.randint(1, 4)):
                    self._forged(replace(own, round=round_, previous=-1))
            case 1:
                self._forged(replace(own, step=own.step + 7))
            case 2:
                self._forged(replace(own, false=True))
                if self.instead == "pass over":  # up to the end, as readers take it that read no manifests
                    while own.step < STEPS:
                        own = replace(own, round=own.round + 1, previous=self.number, step=own.step + 1)
                        self._forged(own)
                    self._forged(replace(own, round=own.round + 1, previous=self.number, stop="completed"))
            case 3:
                self._forged(replace(own, later=True))
            case 4:
                self._forged(own)
            case 5:  # two ahead, of which the second continues the first as it is written
                self._forged(replace(own, round=own.round + 1, previous=-1))
                self._forged(replace(own, round=own.round + 2, previous=self.number, step=own.step + 2))

            case 6:
                self._forged(replace(own, absent=True))
            case 7:  # up to the end, as readers take it that read no manifests
                while own.step < STEPS:
                    self._forged(replace(own, absent=True))
                    own = replace(own, round=own.round + 1, previous=self.number, step=own.step + 1)
                self._forged(replace(own, absent=True))
                self._forged(replace(own, round=own.round + 1, previous=self.number, stop="completed", absent=True))
            case 8:
                absent = {each.number for names in self.stored.values() for each in names if each.absent}
                self.brought |= absent - self.taken

    def _forged(self, commit: Commit) -> None:
        self.number += 1
        if (self.exists(commit) or self.instead == "pass over") and not self.takes(commit.round):
            self.stored.setdefault(commit.round, []).append(replace(commit, number=self.number))

    def judge(self) -> None:
        """What the coordinator does with commits that no other replica than their author has followed."""
        try:
            self.log(derives=True, waits=True)
            return
        except Waits as wait:
            (first,) = wait.args
        found = self.log(derives=False)
        round_ = first
        while round_ <= len(found) and found[-1].commit.by != COORDINATOR:
            commit = found[round_ - 1].commit
            if commit.absent and not found[round_ - 1].void and commit.number not in self.brought:
                self.unfounded.add(commit.number)
                if self.has("abstain"):
                    self.taken.add(commit.number)
                found = self.log(derives=True)  # the leg may have ended earlier by it
            round_ += 1

    def stop(self) -> None:
        """What the coordinator does where a limit of its user is reached: it commits the stop itself."""
        if self.has("judged stop"):
            self.judge()
        found = self.log(derives=False)
        leg = self.leg_of(found)
        if self.has("newest"):
            first = max(self.begins[leg - 1][0], len(found) - IN_A_ROW)
            checked = found[:first]
            for each in found[first:]:
                checked.append(self._read(each.commit, checked, self.leg_of(checked), derives=True))
                if checked[-1].void and not each.void:
                    found = self.log(derives=True)
                    leg = self.leg_of(found)
                    break
        begins = self.begins[leg - 1][0] == len(found)
        if begins or found[-1].stop:
            return
        self.create(replace(self.next(found, COORDINATOR), step=found[-1].step, stop="halted"))

    def supervise(self) -> str:
        """What the coordinator does, who reads no manifests by itself: "end", "halt" or nothing."""
        found = self.log(derives=False)
        if self.has("judge") and (self.rng.random() < 0.3 or (found and found[-1].stop and self.has("judged end"))):
            self.judge()
            found = self.log(derives=False)
        leg = self.leg_of(found)
        last = found[-1] if len(found) > self.begins[leg - 1][0] else None
        result = self.results.get(leg)
        contradicted = self.has("result") and result and last and result != (last.stop, last.commit.number)
        if contradicted or (last and last.stop == "failed" and self.has("failed")):
            found = self.log(derives=True)
            leg = self.leg_of(found)
            last = found[-1] if len(found) > self.begins[leg - 1][0] else None
        written = Counter(each.commit.by for each in found[self.begins[leg - 1][0] :] if each.void)
        many = {by for by, times in written.items() if times >= IN_A_ROW} if self.has("in all") else set()
        if last is None or not last.stop:
            return "halt" if many else ""
        if last.stop == "completed":
            return "end" if leg in self.results else ""  # replicas end by themselves
        if last.stop == "failed":
            many |= {each.commit.by for each in found[-IN_A_ROW:] if each.void}
        barred = self.begins[-1][3] | (many if self.has("barred") else set())
        if len(barred) == REPLICAS and self.has("somebody"):
            barred = self.begins[-1][3]
        planned, self.planned = self.planned, (len(found), last.commit.number, last.step, frozenset(barred))
        if planned is not None:  # what was written between, whoever begins a leg has not seen
            self.begins.append(planned)
            self.planned = None
        return ""


def play(seed: int, without: str = "", instead: str = "", overwrites: bool = False) -> int:
    """One schedule, to its end; returns how many rounds of a leg the insider has spent. Raises `Broken`.

    `overwrites`: the insider replaces a commit of the past by one of its own, once, and readers that come later must
    not read another log than those before.
    """
    rng = random.Random(seed)
    odd = frozenset(each for each in range(INSIDER) if rng.random() < 0.25)
    world = World(rng, without, instead, odd)
    world.begins.append((0, 0, 0, frozenset()))
    try:
        return _play(world, overwrites)
    except Changed as error:
        if overwrites:
            return 0
        raise Broken(f"nobody can read the log any more: {error}") from None


def _play(world: World, overwrites: bool) -> int:
    rng, halt, attacks, odd = world.rng, False, not overwrites, len(world.odd)
    for _ in range(MOST):
        who = rng.randrange(REPLICAS)
        if who == INSIDER and attacks:
            world.forge()
        else:
            world.honest(who, halt or (attacks and rng.random() < 0.05))  # its user may ask for one, too
        if (said := world.supervise()) == "end":
            break
        if attacks and rng.random() < 0.05:
            world.stop()
        halt = said == "halt"
        taken = world.log(derives=True)
        if overwrites and len(taken) >= 4 and not any(each.void for each in taken):
            at = rng.randint(1, len(taken) - 2)
            if len({each.commit.by for each in taken[at : at + 2]}) == 2:  # its own alone are no evidence
                world.number += 1
                world.stored[at] = [replace(taken[at - 1].commit, number=world.number, by=INSIDER)]
                again = world.log(derives=True)
                raise Broken(f"a log that was changed is read as another one, of {len(again)} rounds")
    else:
        raise Broken("the run does not end")
    found, said = world.log(derives=True), world.log(derives=False)
    if not found or found[-1].step != STEPS:
        raise Broken("the coordinator ended a run that is not complete")
    if [each.commit for each in found] != [each.commit for each in said]:
        raise Broken("readers that check verdicts and readers that do not read different logs")
    if any(each.void and each.commit.by == COORDINATOR for each in found):
        raise Broken("the coordinator's stop is void")
    begun = [after for after, _, _, _ in world.begins]
    spent = []  # rounds of the insider's void commits, by leg
    for first, last in zip(begun, [*begun[1:], len(found)], strict=True):
        if any(each.stop for each in found[first : last - 1]):
            raise Broken("a leg goes on after its stop")
        own = [each.void for each in found[first:last] if each.commit.by == INSIDER]
        spent.append(sum(own))
        third = [at for at, void in enumerate(own) if void][IN_A_ROW - 1 : IN_A_ROW]
        for at in third:  # a halt is asked for: rounds that the insider closes rightly need not obey it
            spent[-1] -= 2 * own[at:].count(False)
    # Two more may be written between the third and the halt that it causes.
    if max(spent) > 2 * IN_A_ROW - 1 or sum(each >= IN_A_ROW for each in spent) > 1 + odd:
        raise Broken(f"the insider has spent {spent} rounds")
    return max(spent)
