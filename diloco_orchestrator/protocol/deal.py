"""`OpenDeal`: which batches of a finite data set each replica trains on in a round, as a function of the commit log.

With `deal="open"` the data set is dealt round by round over the replicas that train, so that each pass reads all of it
whichever ids are vacant. The log alone decides: a restarted replica, or a reader, derives the same deal.
"""

from collections.abc import Iterable, Iterator, Sequence

from diloco_orchestrator.protocol.legs import leg_of_base
from diloco_orchestrator.protocol.records import Begin, Commit

Range = tuple[int, int]  # the first number, and the number after the last

# Commits after that of a round in which work of it that came late is expected: the first of these numbers, and at least
# so many for each fragment, since late work comes with the next synchronisation of its fragment.
_AWAITED = 4, 2
_KNOWN = 5  # times as long a deal is remembered, so that work that comes later still counts


class OpenDeal:
    """The deal of batches after each commit, which `add` takes in order.

    Batches are numbered through all passes: number q is batch q % size of pass q // size. A number is *read* once a
    commit has applied work that was trained on it. In a round the replicas that it waits for (its roster) are dealt, in
    the order of their ids, the next `round_steps` lowest numbers each that are neither read nor dealt; others, which
    may start meanwhile, are dealt numbers from the end of a pass. What a replica was dealt and did not train on is
    dealt again: at once where a commit names its contribution, otherwise four commits later (or two for each fragment,
    if that is more), as its work may come late.

    Args:
        size: batches of the data set.
        round_steps: inner steps of a round, each of which takes one batch.
        ids: replica ids of the run.
        fragments: of the model, which rounds synchronise in turn.
    """

    def __init__(self, size: int, round_steps: int, ids: int, fragments: int) -> None:
        self.size = size
        self.round = 0  # of the newest commit added
        self._steps, self._ids = round_steps, ids
        self._awaited = max(_AWAITED[0], _AWAITED[1] * fragments)
        self._read: list[Range] = []
        self._dealt: dict[tuple[int, int], list[Range]] = {}  # by round and replica, as long as its work may come
        self._lapsed: dict[tuple[int, int], list[Range]] = {}  # of some rounds before, dealt again since
        self._roster: tuple[int, ...] = ()

    def begin(self, begin: Begin, replicas: int) -> None:
        """Begin a leg (start or resume to stop), whose first round waits for so many replicas."""
        self._dealt = {who: deal for who, deal in self._dealt.items() if who[0] <= begin.from_round}
        self.round, self._roster = begin.after_round, tuple(range(replicas))
        self._deal()

    def add(self, commit: Commit) -> None:
        """Add the commit of the round after the last one added, and deal the next round."""
        for answer in commit.answers:
            who = commit.round, answer.replica_id
            if answer.kind == "abstention":  # one of these batches may be why its work is not finite: not dealt again
                self._read = _merged([*self._read, *self._dealt.pop(who, ())])
            for origin in answer.origins if answer.averaged and commit.applied else ():
                done = origin.round, answer.replica_id
                trained = _first(self._dealt.pop(done, []) or self._lapsed.pop(done, []), origin.steps)
                self._read = _merged([*self._read, *trained])
        for who in [who for who in self._dealt if who[0] <= commit.round - self._awaited]:
            self._lapsed[who] = self._dealt.pop(who)
        self._lapsed = {
            who: deal for who, deal in self._lapsed.items() if who[0] > commit.round - _KNOWN * self._awaited
        }
        self.round, self._roster = commit.round, commit.roster
        self._deal()

    def of(self, replica_id: int) -> "Dealt":
        """The batches dealt to a replica in the round after the last commit added."""
        return Dealt(self._dealt[self.round + 1, replica_id], self.size)

    def _deal(self) -> None:
        round_, steps = self.round + 1, self._steps
        taken = _merged([*self._read, *(each for deal in self._dealt.values() for each in deal)])
        count = len(self._roster) * steps
        lowest = _first(_free(taken, 0, (taken[-1][1] if taken else 0) + count), count)
        for place, replica_id in enumerate(self._roster):
            self._dealt[round_, replica_id] = _part(lowest, place * steps, steps)
        others = [each for each in range(self._ids) if each not in self._roster]
        count, last = len(others) * steps, lowest[-1][1] if lowest else 0
        end = -(-last // self.size) * self.size
        room = (self._awaited + 2) * count
        if end - last < room:  # too near to what is dealt in this round and the next ones
            end += -(-room // self.size) * self.size
        taken = _merged([*taken, *lowest])
        while (left := _count(highest := list(_free(taken, last, end)))) < count:  # others were dealt most of it before
            end += self.size
        highest = _part(highest, left - count, count)
        for place, replica_id in enumerate(others):
            self._dealt[round_, replica_id] = _part(highest, place * steps, steps)


class Dealt:
    """The batches dealt to one replica in one round, in the order of its inner steps."""

    def __init__(self, numbers: Sequence[Range], size: int) -> None:
        self._numbers, self._size = numbers, size

    def number(self, step: int) -> int:
        """The number, through all passes, of the batch of inner step `step`, from 0. IndexError beyond the round."""
        for first, stop in self._numbers:
            if step < stop - first:
                return first + step
            step -= stop - first
        raise IndexError(step)

    def index(self, step: int) -> int:
        """The index in the data set of the batch of inner step `step`, from 0."""
        return self.number(step) % self._size


def dealt_by(commits: Iterable[Commit], begins: Sequence[Begin], replicas: Sequence[int], deal: OpenDeal) -> None:
    """Add to the new deal `deal` all commits that the newest base descends from or that follow the newest start or
    resume.

    `begins`: the records of all starts and resumes. `replicas`: how many each leg began with, in the same order.
    """
    leg = 0
    for commit in commits:
        while leg < len(begins) and begins[leg].after_round < commit.round:
            deal.begin(begins[leg], replicas[leg])
            leg += 1
        if leg_of_base(begins, commit.round) is not None:
            deal.add(commit)
    for begin, count in zip(begins[leg:], replicas[leg:], strict=True):
        deal.begin(begin, count)


# -- ranges of numbers ------------------------------------------------------------------------------------------------


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """The numbers in `ranges` as disjoint ranges in ascending order, no two of which are adjacent."""
    found: list[Range] = []
    for first, stop in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        elif first < stop:
            found.append((first, stop))
    return found


def _free(taken: Sequence[Range], first: int, stop: int) -> Iterator[Range]:
    """The ranges of numbers from `first` to before `stop` that are not in `taken`, which is merged."""
    for low, high in taken:
        if first >= stop:
            return
        if first < low:
            yield first, min(low, stop)
        first = max(first, high)
    if first < stop:
        yield first, stop


def _count(ranges: Iterable[Range]) -> int:
    return sum(stop - first for first, stop in ranges)


def _first(ranges: Iterable[Range], count: int) -> list[Range]:
    return _part(ranges, 0, count)


def _part(ranges: Iterable[Range], skip: int, count: int) -> list[Range]:
    """`count` numbers of `ranges` after the first `skip`; fewer if there are no more."""
    found = []
    for first, stop in ranges:
        low, high = first + min(skip, stop - first), stop
        skip -= low - first
        high = min(high, low + count)
        if low < high:
            found.append((low, high))
            count -= high - low
    return found
