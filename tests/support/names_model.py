"""A model of signed runs: names, takes, certificates, rotation and invited seats, played by seeded random schedules.

Keys and signatures are symbols: who does not know a key cannot make its signatures, and may copy what lies in the
bucket. `diloco_orchestrator.signing` is the product; the model has its rules and nothing else of it, so that each can
be left out (`play(seed, without=...)`) and the schedule be seen that breaks then. The bucket is create-only: what
overwriting and deleting do is not modelled. docs/inside/signed-runs.md has the rules in words.
"""

import random
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

RULES = {
    "name": "an object counts only under a name by the name key",
    "signature": "a record counts only with its author's signature",
    "key in signature": "a signature is over the key of the object, too",
    "speaks for": "an attempt signs in its own name only",
    "take": "a name that an unsigned object has taken is passed over for the next take",
    "epoch of names": "after a rotation names of later objects are by the new name key",
    "epoch of authors": "a key of an earlier epoch signs no later object",
    "root": "the object of a rotation is named by the run's key, which operators do not hold",
    "seat": "objects of an invited seat are named by a key of that seat, and an invited seat commits nothing",
}
REPLICAS, SEAT, ROUNDS, EPOCH_ROUND = 3, 2, 6, 3  # replica 2 has joined by a link; rounds above 3 are of epoch 2


class Broken(Exception):
    """A schedule broke a promise: the words say which."""


Key = tuple[str, int, int]  # kind, round (of a ring: epoch), replica; -1: of nobody


@dataclass(frozen=True)
class Signed:
    """A symbol that only who knows `by` can make."""

    by: str
    said: Any


@dataclass(frozen=True)
class Stored:
    body: Any
    signature: Signed | None
    author: str  # a key that the certificate names; certificates themselves cannot be forged, and are not modelled
    maker: str = ""  # the attacker that has put it there


@dataclass
class Actor:
    name: str
    knows: set[str]  # private keys


@dataclass
class World:
    rng: random.Random
    without: str
    stored: dict[tuple[Key, Any], Stored] = field(default_factory=dict)  # by key and name
    seen: dict[Key, Any] = field(default_factory=dict)  # body that some reader has read, by key
    rotated: dict[int, bool] = field(default_factory=dict)  # `is_rotated`, by number of objects
    fresh: Any = field(default_factory=lambda: count(1))

    def has(self, rule: str) -> bool:
        return rule != self.without

    # -- rules --------------------------------------------------------------------------------------------------------

    def epoch_of(self, key: Key) -> int:
        return 2 if key[0] != "ring" and key[1] > EPOCH_ROUND and self.is_rotated() else 1

    def is_rotated(self) -> bool:
        if (known := len(self.stored)) not in self.rotated:
            self.rotated[known] = self.read(("ring", 2, -1)) is not None
        return self.rotated[known]

    def name_key(self, key: Key) -> str:
        if key[0] == "ring" and self.has("root"):
            return "root"
        epoch = self.epoch_of(key) if self.has("epoch of names") else 1
        return f"names{epoch} of {key[2]}" if key[2] == SEAT and self.has("seat") else f"names{epoch}"

    def name(self, key: Key, take: int) -> Any:
        return Signed(self.name_key(key), (key, take)) if self.has("name") else (key, take)

    def why_not(self, key: Key, found: Stored) -> str:
        """Reason why a record under a right name does not exist; empty if it does."""
        if not self.has("signature"):
            return ""
        said = (key, found.body) if self.has("key in signature") else found.body
        if found.signature != Signed(found.author, said):
            return "no signature"
        kind, epoch = found.author.partition(" ")[0][:-1], int(found.author.partition(" ")[0][-1:] or 1)
        if key[0] == "ring":
            return "" if found.author == "root1" else "a rotation is by the run's key"
        if epoch < self.epoch_of(key) and self.has("epoch of authors"):
            return "its author's key is of an earlier epoch"
        if kind == "operator":
            return "" if key[0] == "intent" else "no record of an operator"
        replica = int(found.author.rpartition(" ")[2])
        if not self.has("speaks for"):
            return ""
        if key[0] == "intent" or (key[0] == "manifest" and key[2] != replica):
            return "not its own"
        if key[0] == "commit" and (found.body[0] != replica or (replica == SEAT and self.has("seat"))):
            return "not its own"
        return ""

    def read(self, key: Key) -> Stored | None:
        """The record that exists under this key, as every reader finds it."""
        for take in count():
            found = self.stored.get((key, self.name(key, take)))
            if found is None:
                return None
            if not self.why_not(key, found):
                return found
            if not self.has("take"):
                return None
        return None

    # -- moves --------------------------------------------------------------------------------------------------------

    def put(self, key: Key, name: Any, record: Stored) -> bool:
        if (key, name) in self.stored:
            return False
        self.stored[key, name] = record
        return True

    def create(self, who: str, key: Key, body: Any, author: str) -> None:
        """An honest create: of several one wins. Raises `Broken` if none has."""
        signature = Signed(author, (key, body) if self.has("key in signature") else body)
        for take in count():
            if self.put(key, self.name(key, take), Stored(body, signature, author)):
                break
            if not self.why_not(key, self.stored[key, self.name(key, take)]):
                break
            if not self.has("take"):
                raise Broken(f"{who} cannot write {key}: its name is taken")

    def forge(self, actor: Actor) -> None:
        """Something that this attacker can make of what it knows and of what lies there."""
        kinds = [("manifest", REPLICAS), ("commit", 0), ("intent", REPLICAS), ("ring", 0)]
        kind, replicas = self.rng.choice(kinds)
        number = 2 if kind == "ring" else self.rng.randint(1, ROUNDS)
        key = kind, number, self.rng.randrange(replicas) if replicas else -1
        take = self.rng.choice((0, 0, 1, 2))
        names = [name for _, name in self.stored][-4:]  # copied
        if self.name_key(key) in actor.knows or not self.has("name"):
            names += 4 * [self.name(key, take)]
        authors = sorted(each for each in actor.knows if each.startswith(("operator", "attempt")))
        body = (self.rng.randrange(REPLICAS), "forged", next(self.fresh))
        records = [*list(self.stored.values())[-4:], Stored(body, None, "nobody")]
        for author in authors:
            signature = Signed(author, (key, body) if self.has("key in signature") else body)
            records.append(Stored(body, signature, author))
        if names:
            record = self.rng.choice(records)
            self.put(key, self.rng.choice(names), replace(record, maker=actor.name))

    # -- promises -----------------------------------------------------------------------------------------------------

    def check(self, keys: set[Key], attackers: list[Actor]) -> None:
        for key in keys:
            found = self.read(key)
            body = None if found is None else found.body
            if self.seen.get(key, body) != body:
                raise Broken(f"{key} was read with two contents")
            if body is not None:
                self.seen[key] = body
            for (where, name), record in self.stored.items():
                if where != key or not record.maker or self._may_take(record.maker, key):
                    continue
                if any(name == self.name(key, take) for take in range(4)):
                    raise Broken(f"{record.maker} has taken a name of {key}")
            if found is None or key[0] == "ring":
                continue
            if "forged" not in body and body[1] != key[1]:
                raise Broken(f"{key} holds what was said elsewhere: {body}")
            if "forged" in body and not any(self._may(actor, key, found) for actor in attackers):
                raise Broken(f"{key} holds what nobody may say: {found.author}")

    def _may_take(self, maker: str, key: Key) -> bool:
        """Whether an attacker is trusted not to write under a name of this key, which costs readers a request."""
        if key[0] == "ring":
            return False
        if maker == "joiner":
            return key[2] == SEAT
        if maker == "thief":
            return not self.is_rotated() or key[1] <= EPOCH_ROUND
        return maker != "outsider"

    def _may(self, actor: Actor, key: Key, found: Stored) -> bool:
        """Whether a forgery is no more than what this attacker is trusted with."""
        if found.author not in actor.knows:
            return False
        if found.author.startswith("operator") or actor.name.startswith("thief"):
            return not self.is_rotated() or key[1] <= EPOCH_ROUND
        replica = int(found.author.rpartition(" ")[2])
        own = (key[0] == "manifest" and key[2] == replica) or (key[0] == "commit" and found.body[0] == replica)
        return own and not (key[0] == "commit" and replica == SEAT)


def play(seed: int, without: str = "") -> None:
    """One schedule: rounds with commits, a rotation between them, and four attackers. Raises `Broken`.

    The outsider knows no key, the insider those of replica 1 in both epochs, the joiner those of its seat. The thieves
    have the operator's key and all others of epoch 1, which are replaced after round 3; one of them has an insider's
    help later. Forging within that epoch is what a leak means, and no promise is made about it.
    """
    rng = random.Random(seed)
    world = World(rng, without)
    of_seat = {f"names{epoch} of {SEAT}" for epoch in (1, 2)}
    insider = {"attempt1 1", "attempt2 1", "names1", "names2", *of_seat}
    joiner = {f"attempt1 {SEAT}", f"attempt2 {SEAT}", *(of_seat if without != "seat" else {"names1", "names2"})}
    leaked = {"operator1", "names1", f"names1 of {SEAT}", *(f"attempt1 {i}" for i in range(REPLICAS))}
    attackers = [Actor("outsider", set()), Actor("insider", insider), Actor("joiner", joiner)]
    thieves = [Actor("thief", leaked), Actor("thief with an insider", leaked | insider)]
    everybody = [f"replica {i}" for i in range(REPLICAS)]
    for round_ in range(1, ROUNDS + 1):
        if round_ == EPOCH_ROUND + 1:
            for thief in thieves:
                for _ in range(rng.randrange(4)):
                    world.forge(thief)  # before the launcher notices, of what is to come
            if world.is_rotated():
                raise Broken("somebody else has rotated the keys")
            world.create("launcher", ("ring", 2, -1), "names2", "root1")
            attackers += thieves
            world.seen = {key: body for key, body in world.seen.items() if key[1] <= EPOCH_ROUND}
        epoch = world.epoch_of(("commit", round_, -1))
        steps: list[Any] = [lambda who=tuple(attackers): world.forge(rng.choice(who))] * rng.randrange(10)
        for i, actor in enumerate(everybody):
            author = f"attempt{epoch} {i}"
            made = [("manifest", i, author), ("intent", i, f"operator{epoch}"), ("commit", -1, author)]
            for kind, of, by in made[: 2 if i == SEAT else 3]:
                key = kind, round_, of
                steps.append(lambda a=actor, k=key, b=(i, round_), s=by: world.create(a, k, b, s))
        rng.shuffle(steps)
        for step in steps:
            known = len(world.stored)
            step()
            world.check({key for key, _ in list(world.stored)[known:]}, attackers)
        keys = {key for key, _ in world.stored}
        world.check(keys, attackers)
        if absent := [key for key in keys if key[0] != "ring" and world.read(key) is None and key[1] <= round_]:
            raise Broken(f"{absent[0]} is spent: nothing counts there")
