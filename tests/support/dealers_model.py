"""A replica in the model of rounds by scatter-reduce: it follows the rules, may die at every line, and may lie.

Shares no code with the product: a shard is a text, an average the hash of what it averages. A liar lies as dealer and
decider; it writes nothing in the name of others and overwrites nothing. `dealers_checks` runs schedules.
"""

from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from dataclasses import replace
from itertools import count

from dealers_world import (
    DEADLINE_S,
    POLL_S,
    REDUCE_S,
    TRAIN_S,
    Commit,
    Key,
    Manifest,
    Steps,
    Word,
    World,
    dealt_to,
    digest,
)

Words = dict[int, dict[int, tuple[str, int]]]  # dealer -> shard -> digest of its average, take of the reduced shard


class Replica:
    """One attempt of a replica, which follows the rules; its lies are marked by `self._lies`."""

    def __init__(self, world: World, replica: int, attempt: int) -> None:
        self.w, self.id, self.attempt, self.rng, self.rules = world, replica, attempt, world.rng, world.rules
        self.pace = (world.scenario.speeds or (1.0,) * world.scenario.replicas)[replica]
        self.found: dict[Word, bool] = {}  # averages that others published: whether they are false
        self.made = set[Word]()  # of these, what it has said in a record that a commit names
        self.distrusted, self.outvoted = set[int](), 0
        self.round, self.base, self.derived, self.rebuilt_from = 0, world.truth(0), True, 0
        self.asked, self.rebuilt_in, self.proved_in, self.to_rebuild = set[Key](), 0, 0, False

    def _lies(self, deed: str) -> bool:
        return self.id in self.w.scenario.liars and deed in self.w.scenario.deeds

    @property
    def _in_pair(self) -> bool:
        return self._lies("sum") and len(self.w.scenario.liars) > 1

    def _request_s(self) -> float:
        return 0.05 + 0.3 * self.rng.random()

    def _dawdle_s(self) -> float:
        return self.rng.choice((30.0, 90.0, 200.0)) if self.rng.random() < self.w.scenario.slow else 0.0

    def main(self) -> Steps:
        yield self._request_s()
        self.round = self.w.last_round()
        yield from self._rebuild()
        while self.round < self.w.scenario.rounds:
            self._open()
            yield from self._tell()
            yield from self._contribute()
            if self.attempt < self.w.attempts[self.id]:
                return "superseded"
            if (end := (yield from self._close())) is not None:
                return end
        return "completed"

    def _open(self) -> None:
        """Forget what was received; read the state of the log that deals the round."""
        self.now_open, self.opened_at, self.state = self.round + 1, self.w.now, self.w.state(self.round)
        if "agreed" not in self.rules and self.rng.random() < 0.5:
            self.state = replace(self.state, path="gather")
        self.scatters = self.w.scatters(self.state)
        self.manifests: dict[int, Manifest] = {}
        self.read: dict[tuple[int, int], bool] = {}  # (author, shard) -> whether its bytes were right
        self.said: set[tuple[int, int]] = set()
        self.told: dict[tuple[int, int], dict[int, bool]] = defaultdict(dict)  # words about it, by replica
        self.checks: set[Key] = set()
        self.accusations, self.said_words = set[Word](), set[Word]()  # heard and made in the round
        self.seen_first: tuple[int, ...] = ()  # whose manifests were there when it first looked

    # -- contribute ----------------------------------------------------------------------------------------------

    def _contribute(self) -> Steps:
        w, r = self.w, self.now_open
        units, dropped = self._owed()
        yield TRAIN_S * self.pace * self.rng.uniform(0.95, 1.05)
        if ("manifest", r, self.id) in w.store:
            return
        if self.attempt < w.attempts[self.id]:
            return
        if "before" in self.rules:
            yield from self._hear()
        abstains = yield from self._rebuild_if_disproved()
        if self.attempt < w.attempts[self.id]:
            return
        rotten = self._lies("rot") or self.rng.random() < w.scenario.rot
        bad = self.rng.choice(w.everyone) if rotten else None
        for k in w.everyone:
            w.create(("payload", r, self.id, k), "junk" if k == bad else f"gradient {r} {self.id} {k}")
            yield self._request_s()
        claim, fresh = digest(self.base), frozenset({(self.id, r)})
        if self._lies("claim"):
            claim = digest("false", r)
        manifest = Manifest(
            digests=tuple(digest(f"gradient {r} {self.id} {k}") for k in w.everyone),
            claim=claim,
            abstains=abstains,
            fresh=fresh,
            units=frozenset() if abstains else units | fresh,
            dropped=dropped | units | fresh if abstains else dropped,
        )
        w.create(("manifest", r, self.id), manifest)
        late = "late " if w.commit(r) else ""
        w.say("replica", self.id, "contributes", f"{late}to {r}, claims", claim, "ABSTAINS" if abstains else "")

    def _owed(self) -> tuple[frozenset[Key], frozenset[Key]]:
        """Work of the last manifest that no commit named: what is carried, and what is dropped for its wrong base."""
        w, none = self.w, frozenset[Key]()
        for r in range(self.round, 0, -1):
            if (manifest := w.store.get(("manifest", r, self.id))) is not None:
                if self.id in w.inputs(r):
                    return none, none
                right = manifest.claim == digest(w.truth(r - 1))
                return (manifest.units, none) if right else (none, manifest.units)
        return none, none

    # -- receive, read, tell -------------------------------------------------------------------------------------

    def _readers(self, author: int, shard: int) -> tuple[int, ...]:
        """Who reads a shard of a contribution before the commit."""
        among = self.state.dealers
        if "log" not in self.rules:
            among = self.seen_first = self.seen_first or tuple(sorted({*self.manifests, self.id}))
        if "deputy" not in self.rules:
            return tuple(i for i in dealt_to(self.now_open, shard, self.w.scenario.replicas, among) if i != author)
        return dealt_to(self.now_open, shard, self.w.scenario.replicas, among, but=author)

    def _deals(self, author: int, shard: int) -> bool:
        return not self.scatters or self.id in self._readers(author, shard)

    def _receive(self) -> Steps:
        w, r = self.w, self.now_open
        self.manifests = w.manifests(r)
        yield self._request_s()
        mine = [(a, k) for a in self.manifests for k in w.everyone if a != self.id and self._deals(a, k)]
        if any(each not in self.read for each in mine):
            yield self._dawdle_s()
            yield from self._look_at(mine)
        yield from self._tell()
        yield from self._hear()

    def _hear(self) -> Steps:
        """Read check records; average the shards of which others accuse replicas of a false average."""
        w, r = self.w, self.now_open
        for key in w.keys("check", r):
            if key not in self.checks:
                self.checks.add(key)
                for good, shards in zip((True, False), w.store[key][:2], strict=True):
                    for each in sorted(shards):  # of two words of one replica, the bad one counts
                        self.told[each][key[2]] = good and self.told[each].get(key[2], True)
                barred = self.state.barred
                accused = sorted(word for word, false in w.store[key][2] if false and key[2] not in barred)
                self.accusations |= set(accused)
                for word in accused[:1]:
                    if word not in self.found and "tried" in self.rules and not self._in_pair:
                        yield self._request_s()
                        self._try(*word)
        yield from self._tell()

    def _try(self, round_: int, shard: int, who: tuple[int, ...], said: str) -> None:
        """Find out by the payloads whether replicas published a false average."""
        w = self.w
        published = all(w.store.get(("sums", round_, i), {}).get(shard, ("",))[0] == said for i in who)
        false = published and said != digest(w.average(round_, shard, w.inputs(round_)))
        w.vain[self.id] += not false
        self._note((round_, shard, who, said), false)

    def _note(self, word: Word, false: bool) -> None:
        """Remember whether replicas published a false average; one of owner and checker may be in bases."""
        self.found[word] = false
        if false:
            self.distrusted |= set(word[2]) if "distrust" in self.rules else set()
            if len(word[2]) == 2:
                self.proved_in, self.to_rebuild = self.round + 1, True

    def _rebuild_if_disproved(self) -> Steps:
        """Rebuild the base if a false average may be in it. Returns whether it was another."""
        if not self.to_rebuild or "rebuild" not in self.rules or self._in_pair:
            return False
        before, self.to_rebuild = digest(self.base), False
        yield from self._rebuild()
        if digest(self.base) != before:
            self.rebuilt_in = self.now_open
            self.w.say("replica", self.id, "rebuilds", self.round, "as", digest(self.base), "after an accusation")
        return digest(self.base) != before

    def _statements(self) -> frozenset[tuple[Word, bool]]:
        """What this replica says in this round about averages that others have published."""
        words = {
            (word, false)
            for word, false in self.found.items()
            if (false and word not in self.made) or word in self.accusations
        }
        if "told" not in self.rules or self._in_pair:
            words = {(word, False) for word in self.accusations}
        if self._lies("accuse"):
            r = self.now_open - 1
            honest = set(self.w.everyone) - set(self.w.scenario.liars)
            sums = {i: self.w.store.get(("sums", r, i), {}) for i in honest}
            words |= {((r, k, (i,), sums[i][k][0]), True) for i in sums for k in sums[i]}
        return frozenset(each for each in words if each[0] not in self.said_words)

    def _look_at(self, shards: Iterable[tuple[int, int]]) -> Steps:
        """Read payload shards of others."""
        yield self._request_s()
        for author, shard in shards:
            if (author, shard) not in self.read:
                self.read[author, shard] = self.w.is_right(self.now_open, author, shard)
                if not (self._lies("good") or self._lies("bad")):
                    self.w.readers[self.now_open, author, shard].add(self.id)

    def _tell(self) -> Steps:
        """Write a check record about what was read since the last one."""
        w, r, new, words = self.w, self.now_open, self.read.keys() - self.said, self._statements()
        if not (new or words) or not self.scatters or self._lies("mute"):
            return
        take = next(t for t in count(1) if ("check", r, self.id, t) not in w.store)
        if take > 1 and "takes" not in self.rules:
            return
        good = {each for each in new if self.read[each]}
        good = new if self._lies("good") else set() if self._lies("bad") else good
        yield self._request_s()
        w.create(("check", r, self.id, take), (frozenset(good), frozenset(new - good), words))
        self.said |= new
        self.said_words |= {word for word, _ in words}
        if "again" not in self.rules:
            self.made |= self.said_words
        w.say("replica", self.id, f"take {take}: good", sorted(good), "bad", sorted(new - good), *sorted(words))

    # -- decide --------------------------------------------------------------------------------------------------

    def _close(self) -> Steps:
        w, r = self.w, self.now_open
        while True:
            yield self._request_s()
            if w.commit(r):
                break
            yield from self._receive()
            if (yield from self._heal()) or (yield from self._decide()):
                continue
            yield POLL_S
        return (yield from self._apply())

    def _shared(self) -> str:
        """The claim that a commit would name."""
        mine = digest(self.base)
        if "named" in self.rules and self.proved_in == self.now_open:
            return mine
        counted = {i: m for i, m in self.manifests.items() if not m.abstains} or self.manifests
        sizes = Counter(each.claim for each in counted.values())
        largest = max(sizes.values())
        tied = [each.claim for _, each in sorted(counted.items()) if sizes[each.claim] == largest]
        return mine if mine in tied or (largest == 1 and self.rebuilt_in == self.now_open) else tied[0]

    def _status(self, author: int, shard: int) -> str:
        """good, bad, disputed or open: a shard of a contribution, by own reading and the words of others."""
        each = author, shard
        if each in self.read:
            return "good" if self.read[each] else "bad"
        if not self.scatters:
            if author == self.id:  # if the store has damaged it, its author puts it again when others ask for it
                return "good" if self.w.is_right(self.now_open, author, shard) else "bad"
            return "open"
        barred = self.state.barred
        words = {
            i: word
            for i, word in self.told[each].items()
            if i not in barred and (i != author or "other" not in self.rules)
        }
        if "other" not in self.rules:
            words[author] = True
        enough = 2 if "both" in self.rules and self.w.now - self.opened_at < DEADLINE_S else 1
        if len(words) < min(enough, len(self._readers(author, shard))):
            return "open"
        if author == self.id and not all(words.values()):  # it reads its own payload back
            if not self.w.is_right(self.now_open, author, shard):
                return "bad"
            return "good" if any(words.values()) else "open"
        if all(words.values()) or ("dispute" not in self.rules and any(words.values())):
            return "good"
        return "disputed" if "read" in self.rules else "bad"

    def _statuses(self, author: int) -> set[str]:
        return {self._status(author, shard) for shard in self.w.everyone}

    def _which(self, authors: Iterable[int], status: str) -> list[tuple[int, int]]:
        shards = ((a, k) for a in authors for k in self.w.everyone)
        return [each for each in shards if each[0] != self.id and self._status(*each) == status]

    def _decide(self) -> Steps:
        """Commit the open round if it can end. Returns whether it looked anew or committed."""
        w, waited = self.w, self.w.now - self.opened_at
        if self._lies("mute"):
            return False
        quorum, shared = w.scenario.quorum, self._shared()
        right = [i for i, m in sorted(self.manifests.items()) if m.claim == shared and not m.abstains]
        if self._lies("grab") and len(right) >= quorum and self.id in right and self.rng.random() < 0.3:
            return (yield from self._commit(right, shared))
        if disputed := self._which(right, "disputed"):
            yield from self._look_at(disputed)
            yield from self._tell()
            return True
        open_ = [i for i in right if "open" in self._statuses(i)]
        awaited = (set(self.state.roster) - set(self.manifests)) | (set(self.state.roster) & set(open_))
        if awaited and waited < DEADLINE_S:
            return False
        if silent := self._which(right, "open"):
            late = {each[0] for each in silent} - set(self.state.roster)
            if waited >= DEADLINE_S:
                if "silent" not in self.rules:
                    return False
                w.stood_in += 1
                yield from self._look_at(silent)
                yield from self._tell()
                return True
            right = [i for i in right if i not in late]
        named = [i for i in right if self._statuses(i) == {"good"}]
        if self.id in open_ and ((quorum == 1 and not named) or "alone" not in self.rules):
            named = sorted({*named, self.id})
        if len(named) >= quorum:
            return (yield from self._commit(named, shared))
        nobody_comes = len(self.manifests) == w.scenario.replicas and not self._which(right, "open")
        nobody_comes &= self.id not in open_
        if nobody_comes or (waited >= 3 * DEADLINE_S and len(self.manifests) >= quorum and self.id not in open_):
            return (yield from self._commit([], shared))
        return False

    def _commit(self, named: list[int], shared: str) -> Steps:
        w, r = self.w, self.now_open
        answered = tuple(sorted(self.manifests))
        late = {i for i in w.manifests(r - 1) if i not in w.store["commit", r - 1].answered} if r > 1 else set[int]()
        roster = tuple(sorted({*answered, *late}))
        path = self.rng.choice(("gather", "scatter")) if w.scenario.mixed else "scatter"
        checks = tuple(sorted(self.checks | set(w.keys("check", r)))) if self.scatters else ()
        if self._lies("omit"):
            checks = tuple(key for key in checks if not w.store[key][2])
        commit = Commit(
            by=self.id,
            named=tuple(named),
            answered=answered,
            claim=shared,
            checks=checks,
            roster=roster if len(roster) >= w.scenario.quorum else w.everyone,
            barred=w.barred_by(r, checks),
            path=path,
        )
        yield self._request_s()
        if w.create(("commit", r), commit):
            why = w.why_void(r)
            w.say(
                "replica",
                self.id,
                "commits",
                r,
                named,
                "of",
                answered,
                f"barred {commit.barred}",
                why and f"VOID: {why}",
            )
        return True

    # -- heal ----------------------------------------------------------------------------------------------------

    def _rebuild(self) -> Steps:
        """Take the base after `self.round` from a snapshot that another replica's claim confirms, and payloads."""
        w = self.w
        yield 5.0
        start, base = 0, w.truth(0)
        for r in range(self.round, 0, -1):
            if (found := w.store.get(("snapshot", r))) is not None:
                by, base_there = found
                claims = [m.claim for i, m in w.manifests(r + 1).items() if i != by]
                if digest(base_there) in claims:
                    start, base = r, base_there
                    break
        for r in range(start + 1, self.round + 1):
            base = w.after(base, r)
        self.base, self.derived, self.rebuilt_from = base, True, start

    def _search(self) -> Steps:
        """Compare the averages that others published since the snapshot with those that the payloads give."""
        if "search" not in self.rules or self._in_pair:
            return
        yield 5.0
        for r in range(self.rebuilt_from + 1, self.round + 1):
            named = self.w.inputs(r)
            sums = {key[2]: self.w.store[key] for key in self.w.keys("sums", r)}
            for k in self.w.everyone if named else ():
                self._compare(r, k, self.w.average(r, k, named), {i: sums[i][k][0] for i in sums if k in sums[i]})

    def _compare(self, round_: int, shard: int, average: str, said: dict[int, str]) -> None:
        """Note who published a false average of a shard. `said`: digests that its dealers published, by dealer."""
        for false in sorted({word for word in said.values() if word != digest(average)}):
            who = tuple(sorted(i for i, word in said.items() if word == false))
            if self.id not in who:
                self._note((round_, shard, who, false), True)

    def _heal(self) -> Steps:
        """Rebuild the base if the claims of others, or a false average, contradict it. Returns whether it did."""
        if self._in_pair:
            return False
        if (yield from self._rebuild_if_disproved()):
            return True
        r, mine = self.now_open, digest(self.base)
        sizes = Counter(each.claim for each in self.manifests.values())
        ready = set(self.state.roster) <= set(self.manifests) or self.w.now - self.opened_at > DEADLINE_S
        larger = {c for c in sizes if c != mine and sizes[c] >= sizes[mine]} if ready else set[str]()
        new = {(r, claim) for claim in larger} - self.asked
        if not new:
            return False
        self.asked |= new
        yield from self._rebuild()
        self.rebuilt_in = r
        self.w.say("replica", self.id, "rebuilds", r - 1, "as", digest(self.base), digest(self.base) != mine)
        yield from self._search()
        return True

    # -- apply ---------------------------------------------------------------------------------------------------

    def _apply(self) -> Steps:
        w, r = self.w, self.now_open
        commit = w.store["commit", r]
        if not w.why_void(r):
            self.made |= {word for key in commit.checks if key[2] == self.id for word, _ in w.store[key][2]}
        if not w.why_void(r) and commit.claim != digest(self.base) and not self._in_pair:
            yield from self._rebuild()
            self.rebuilt_in = r
            yield from self._search()
            manifest = w.store.get(("manifest", r, self.id))
            claims = Counter(m.claim for m in w.manifests(r).values())
            here = digest(self.base)
            if (
                manifest
                and manifest.claim == here
                and claims[here] < claims[commit.claim]
                and self.id in commit.answered
                and self.proved_in != r
            ):
                self.outvoted += 1
                if self.outvoted == 3:
                    return "diverged"
        if named := w.inputs(r):
            yield self._dawdle_s()
            yield from self._average(named)
        self.round = r
        w.stepped[r][self.id] = self.base
        yield from self._snapshot(named)
        return None

    def _average(self, named: tuple[int, ...]) -> Steps:
        w, r = self.w, self.now_open
        commit = w.store["commit", r]
        among = (
            tuple(i for i in commit.answered if i not in self.state.barred)
            if "answered" in self.rules
            else self.state.dealers
        )
        dealers = {k: dealt_to(r, k, w.scenario.replicas, among) for k in w.everyone}
        if not self.scatters or len(dealers[0]) < 2:
            yield self._request_s()
            self.base = w.after(self.base, r)
            return
        made: dict[int, str] = {}
        for k in (k for k in w.everyone if self.id in dealers[k]):
            yield self._request_s()
            made[k] = self._made(k, named, dealers[k])
        if not self._lies("mute"):
            yield from self._publish(made, dealers)
        others = [k for k in w.everyone if k not in made]
        if others and "draw" in self.rules:
            drawn = self.rng.choice(others) if "secret" in self.rules else others[(r + self.id) % len(others)]
            yield self._request_s()
            made[drawn] = w.average(r, drawn, named)
        words = yield from self._words(dealers, [k for k in others if k not in made])
        yield from self._take(named, dealers, made, words)

    def _made(self, shard: int, named: tuple[int, ...], dealers: tuple[int, ...]) -> str:
        """The average of a shard as this dealer makes it."""
        w, r = self.w, self.now_open
        if self._in_pair and set(dealers) <= set(w.scenario.liars) and self._pays(shard):
            return f"false {r} {shard}"
        if "inputs" not in self.rules:
            seen = [i for i in sorted(w.manifests(r)) if all(w.is_right(r, i, k) for k in w.everyone)]
            return w.average(r, shard, seen)
        return w.average(r, shard, named)

    def _pays(self, shard: int) -> bool:
        """Whether a pair lies about a shard: where draws can be foretold, only if nobody honest draws it."""
        if "secret" in self.rules:
            return True
        w, r = self.w, self.now_open
        for i in set(w.everyone) - set(w.scenario.liars):
            others = [k for k in w.everyone if i not in dealt_to(r, k, w.scenario.replicas, w.everyone)]
            if others and others[(r + i) % len(others)] == shard:
                return False
        return True

    def _publish(self, made: dict[int, str], dealers: dict[int, tuple[int, ...]]) -> Steps:
        """Write the shards that this replica owns, then its word about all that are dealt to it."""
        w, r, word = self.w, self.now_open, dict[int, tuple[str, int]]()
        for k, average in sorted(made.items()):
            told = f"wrong {self.id} {k}" if self._lies("sum") and not self._in_pair else average
            take = 0
            if dealers[k][0] == self.id:
                data = "junk" if self._lies("bytes") else told
                for take in count(1):
                    yield self._request_s()
                    if w.create(("reduced", r, k, take), data) or w.store["reduced", r, k, take] == data:
                        break
            word[k] = digest(told), take
        yield self._request_s()
        w.create(("sums", r, self.id), word)

    def _words(self, dealers: dict[int, tuple[int, ...]], needed: list[int]) -> Generator[float, None, Words]:
        """The words of the dealers, once there are those about all shards that are needed, or after the deadline."""
        w, r, began = self.w, self.now_open, self.w.now
        while True:
            yield self._request_s()
            found = {key[2]: w.store[key] for key in w.keys("sums", r)}
            if all(who in found for k in needed for who in dealers[k]):
                return found
            if w.now - began > REDUCE_S and "payloads" in self.rules:
                w.stood_in += 1
                w.awaited |= {who for k in needed for who in dealers[k]} - set(w.store["commit", r].answered)
                return found
            yield POLL_S

    def _take(
        self,
        named: tuple[int, ...],
        dealers: dict[int, tuple[int, ...]],
        made: dict[int, str],
        words: Words,
    ) -> Steps:
        """Take the outer step: with averages made here, and with those of others that their words bear out."""
        w, r, borrowed, new = self.w, self.now_open, False, list(self.base)
        for k in w.everyone:
            owner, checker = dealers[k]
            told = {who: words[who][k][0] for who in (owner, checker) if k in words.get(who, {})}
            average = made.get(k)
            if average is None:
                data = w.store.get(("reduced", r, k, words[owner][k][1])) if owner in told else None
                if data is not None and (digest(data) != told[owner] or self.distrusted & set(dealers[k])):
                    data = None
                if data is not None and (told.get(checker) == told[owner] or "agree" not in self.rules):
                    average, borrowed = data, True
            if average is None:
                yield self._request_s()
                average = w.average(r, k, named)
                made[k] = average
            if k in made and not self._in_pair:
                self._compare(r, k, average, told)
            new[k] = digest(self.base[k], average)
        self.base, self.derived, self.round = tuple(new), self.derived and not borrowed, r
        self.proved_in = r + 1 if self.to_rebuild else self.proved_in
        w.contradicted[self.id] += yield from self._rebuild_if_disproved()

    def _snapshot(self, named: tuple[int, ...]) -> Steps:
        """Write the snapshot of the round if it is due and this replica's turn."""
        every, honest = self.w.scenario.snapshot_every, [i for i in named if i not in self.w.scenario.liars]
        if self.round % every or not honest or honest[self.round // every % len(honest)] != self.id:
            return
        if "snap" in self.rules and not self.derived:
            before = digest(self.base)
            yield from self._rebuild()
            self.w.stepped[self.round][self.id] = self.base
            if digest(self.base) != before:
                yield from self._search()
        yield self._request_s()
        self.w.create(("snapshot", self.round), (self.id, self.base))


def attempt(world: World, replica: int, number: int) -> Steps:
    """One attempt of a replica, from its start to the run's end. Returns how it ended."""
    return Replica(world, replica, number).main()
