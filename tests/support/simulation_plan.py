"""`Plan`: one simulated run and its misfortunes, and the three ways to draw one from a seed.

`plan_of` draws small runs with crashes and a bad network, `wide_plan_of` adds what larger runs and other settings can
meet, `flips_of` draws bits that flip in memory. `calm` is a plan of which a test says what goes wrong.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

STEP_S = 1.0

# Where a bit may flip: in the base at once; or in the next average, base before or after a step, rebuilt base, or base
# while a snapshot of it is written.
FLIPS = ("parameters", "momenta", "average", "before step", "after step", "rebuild", "snapshot")

# Records that somebody forges: `simulation_forgeries`. Some may give a replica up (SECURITY.md).
GIVE_UP = ("exit 0", "exit 78", "out")
FORGERIES = (
    *("legs", "claims", "intent", "requests", "manifest", "exit 1", "exit 75", "exit 76", "cancel", "result"),
    *GIVE_UP,
)

Flip = tuple[float, int, str]  # (when, which replica; -1: the coordinator, where of FLIPS): one bit
HEALED_S = 40.0  # after which a flip has been healed

Spans = tuple[tuple[float, float], ...]  # (from, until), in seconds


@dataclass(frozen=True)
class NextLeg:
    """A leg that a user begins once the one before has stopped."""

    rounds: int
    lr: float | None = None  # the outer learning rate, where it changes
    kills: tuple[tuple[float, int], ...] = ()  # as of a plan, from the leg's begin on
    replicas: int | None = None  # that the leg begins with, where it changes


@dataclass(frozen=True)
class Plan:
    """One run and its misfortunes. Times are seconds from its start; replica -1 is the coordinator, -2 everybody."""

    seed: int  # of the network, of start times, and of the order of events
    # -- the run
    replicas: int
    rounds: int
    settings: Mapping[str, Any]
    paces: tuple[float, ...]  # s per inner step, by replica
    width: int = 1  # elements of each of the model's two parameters
    buffer: bool = False  # whether the model has a buffer that each step changes
    tokens: tuple[int, ...] = ()  # of a step, by replica; empty: one each
    next_leg: NextLeg | None = None
    # -- the network before the bucket
    fail: float = 0.0  # share of calls that fail before they take effect
    lose_reply: float = 0.0  # share of calls that take effect and then fail
    twice: float = 0.0  # share of creates that are sent twice
    latency_s: float = 0.05
    listing_lag_s: float = 0.0
    stale_s: float = 0.0  # after an overwrite, in which half of all reads give the version before
    storms: Spans = ()  # nearly every call is answered 503
    no_writes: Spans = ()  # every write is refused
    no_network: Spans = ()  # nobody reaches the bucket or the vendor
    # -- processes and their vendor
    kills: tuple[tuple[float, int], ...] = ()  # SIGKILL: (when, which)
    stops: tuple[tuple[float, int, float], ...] = ()  # SIGSTOP: (when, which, for how long)
    rank_kills: tuple[
        tuple[float, int, int], ...
    ] = ()  # SIGKILL of one rank of a replica of several: (when, which, rank)
    rank_stops: tuple[tuple[float, int, int, float], ...] = ()  # SIGSTOP of one: (when, which, rank, for how long)
    notices: tuple[tuple[float, int], ...] = ()  # SIGTERM
    coordinators: tuple[float, ...] = ()  # when one more attaches, beside those that run
    vendor_down: Spans = ()  # every call to the vendor fails
    no_machine: tuple[tuple[float, float, int], ...] = ()  # (from, until, replica): the vendor has no machine for it
    lies: tuple[tuple[float, int], ...] = ()  # (when, which): from then on its vendor calls a living attempt dead
    machines: int = 0  # that join by themselves and take the attempts; 0: a vendor starts them
    machine_kills: tuple[tuple[float, int], ...] = ()  # (when, which machine) is lost with what runs on it
    machine_notices: tuple[tuple[float, int], ...] = ()  # (when, which machine): SIGTERM for `diloco join`
    refused: tuple[int, ...] = ()  # replicas whose attempts end as permanent errors: they bring another model
    # -- what is in the bucket
    full: Spans = ()  # every write is answered that there is no room
    corrupt_payloads: tuple[tuple[int, int], ...] = ()  # (round, replica) whose payload goes bad after it is written
    rots: tuple[tuple[float, int, int], ...] = ()  # (when, round, replica) whose payload is damaged at that time
    lost_payloads: tuple[tuple[int, int], ...] = ()  # (round, replica): the store acknowledges it and does not keep it
    no_commits: tuple[tuple[int, bytes], ...] = ()  # (round, bytes) under its commit's key before anybody starts
    reports_s: tuple[tuple[int, float], ...] = ()  # (replica, `train_s` that all its manifests report)
    forged: tuple[tuple[int, int], ...] = ()  # (round, replica): bytes under its manifest's key before anybody starts
    forgeries: tuple[tuple[float, str, int], ...] = ()  # (when, which of `FORGERIES`, replica): well-formed records
    # -- arithmetic
    nan: tuple[tuple[int, int], ...] = ()  # (batch, replica) with a gradient that is not finite
    flips: tuple[Flip, ...] = ()
    other_arithmetic: tuple[int, ...] = ()  # replicas whose outer step gives other bits, always
    # -- the user
    collapse: bool = False  # the loss falls from round 3 on, so that the guard fires
    halt_at: float | None = None
    scales: tuple[tuple[float, int], ...] = ()  # (when, replicas wanted from then on), with the setting max_replicas

    @property
    def most_replicas(self) -> int:
        """The number of replica ids."""
        return int(self.settings.get("max_replicas") or self.replicas)

    @property
    def strict(self) -> bool:
        return self.settings["quorum"] == "all"

    @property
    def adapted(self) -> bool:
        """Whether the model is a frozen layer with a LoRA adapter, whose products are averaged exactly."""
        return self.settings.get("adapters") == "exact"

    @property
    def harms(self) -> bool:
        """Whether an object was damaged, lost, forged or refused for good: then a run may fail, in words."""
        return bool(self.corrupt_payloads or self.rots or self.lost_payloads or self.full)

    @property
    def gives_up(self) -> bool:
        """Whether the run may end because replicas are given up: a forged record may give up one that a quorum needs,
        and more than those that are wanted at the least may end for one cause, for which no further id is launched.
        """
        alike = bool(self.settings.get("max_replicas")) and len(self.refused) > self.replicas
        return alike or any(what in GIVE_UP for _, what, _ in self.forgeries)

    @property
    def exact(self) -> bool:
        """Whether the run must end with the undisturbed run's bits."""
        lasting = (
            self.flips
            or self.other_arithmetic
            or self.collapse
            or self.nan
            or self.halt_at is not None
            or self.harms
            or self.no_commits
            or self.forged
            or self.forgeries
        )
        return self.strict and not lasting and self != self.undisturbed()

    @property
    def outnumbers(self) -> bool:
        """Whether the replicas whose arithmetic is everybody's are the larger group of every round that can end.

        With quorum=1 one machine ends rounds while most others are away, and nobody can tell who is wrong.
        """
        other, quorum = len(self.other_arithmetic), self.settings["quorum"]
        needed = self.replicas if quorum == "all" else -(-self.replicas // 2) if quorum is None else quorum
        return not other or (2 * other < self.replicas and other < needed)

    def undisturbed(self) -> "Plan":
        """The same run when nothing goes wrong, with one rank in each replica."""
        leg = self.next_leg and replace(self.next_leg, kills=())
        run = {"width": self.width, "buffer": self.buffer, "tokens": self.tokens, "next_leg": leg}
        settings = {**self.settings, "ranks_per_replica": 1}
        return Plan(0, self.replicas, self.rounds, settings, (STEP_S,) * self.most_replicas, **run)  # type: ignore[arg-type]


def plan_of(seed: int, replicas: int | None = None, rounds: int | None = None, **settings: Any) -> Plan:
    """Everything about the run of a seed. What is given is not drawn."""
    draw = random.Random(seed)
    replicas = replicas or draw.choice([1, 2, 2, 3, 3, 4])
    rounds = rounds or draw.choice([3, 4, 5])
    quorum = draw.choice(["all", "all", None, None, 1])
    fragments, delay = draw.choice([(1, 0), (1, 0), (1, 0), (1, 1), (2, 0), (2, 1)])
    drawn = {
        "quorum": quorum,
        "sync_every": 4 * fragments,
        "fragments": fragments,
        "fragment_sync_delay": delay,
        "late": draw.choice(["carry", "carry", "drop"]),
        "snapshot_every": draw.choice([1, 2, 3]),
        "retention": draw.choice([{}, {}, {"payloads": "needed", "snapshots": 2}]),
    }
    drawn.update(settings)
    length = 5.0 * STEP_S * 4 * rounds  # kills and storms fall into the run, mostly

    def some(most: int) -> int:
        return draw.randint(0, most)

    def when() -> float:
        return round(draw.uniform(0.5, length), 2)

    def spans(most: int, longest: float) -> tuple[tuple[float, float], ...]:
        begun = [when() for _ in range(some(most))]
        return tuple((begin, begin + draw.uniform(1.0, longest)) for begin in begun)

    rough = draw.random() < 0.7
    return Plan(
        seed=seed,
        replicas=replicas,
        rounds=rounds,
        settings=drawn,
        paces=tuple(STEP_S * draw.choice([1.0, 1.0, 1.05, 1.3, 3.0]) for _ in range(replicas)),
        fail=draw.choice([0.0, 0.02, 0.1]) if rough else 0.0,
        lose_reply=draw.choice([0.0, 0.02, 0.1]) if rough else 0.0,
        twice=draw.choice([0.0, 0.05]) if rough else 0.0,
        latency_s=draw.choice([0.01, 0.05, 0.5]),
        listing_lag_s=draw.choice([0.0, 0.0, 2.0]) if rough else 0.0,
        storms=spans(1, 60.0) if rough else (),
        no_writes=spans(1, draw.choice([30.0, 3600.0])) if draw.random() < 0.15 else (),
        kills=tuple((when(), draw.randint(-2, replicas - 1)) for _ in range(some(3))),
        stops=tuple((when(), draw.randrange(replicas), draw.choice([3.0, 40.0, 300.0])) for _ in range(some(1))),
        notices=tuple((when(), draw.randrange(replicas)) for _ in range(some(1))),
        lies=tuple((when(), draw.randrange(replicas)) for _ in range(some(1))) if rough else (),
        corrupt_payloads=((draw.randint(1, rounds), draw.randrange(replicas)),) if draw.random() < 0.1 else (),
        nan=((draw.randint(0, 4 * rounds), draw.randrange(replicas)),) if draw.random() < 0.1 else (),
        collapse=draw.random() < 0.1,
        halt_at=when() if draw.random() < 0.1 else None,
        flips=tuple((8.0 + when(), draw.randrange(replicas), draw.choice(FLIPS)) for _ in range(some(2)))
        if draw.random() < 0.2
        else (),
    )


def wide_plan_of(seed: int) -> Plan:
    """The run of a seed with settings, sizes and faults that `plan_of` does not draw."""
    draw = random.Random(f"wide {seed}")
    replicas, rounds = draw.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 8]), draw.choice([3, 3, 4, 4, 6, 10])
    aggregates = ["mean", "mean", "mean", "agreeing_mean", "median", "trimmed_mean"] if replicas >= 4 else ["mean"]
    aggregate = draw.choice(aggregates)
    by_tokens = aggregate in ("mean", "agreeing_mean") and draw.random() < 0.3
    settings = {
        "aggregate": aggregate,
        "weights": "tokens" if by_tokens else "uniform",
        "clip": draw.choice(["median_norm", "median_norm", "off"]),
        "clip_factor": draw.choice([None, None, 1.05]),
        "codec": draw.choice(["fp32", "fp32", "bf16"]),
        "fragment_update_alpha": draw.choice([0.0, 0.0, 0.0, 0.25, 0.5]),
        "replica_state": draw.choice([None, None, "round", "snapshot", "none"]),
        "outer": draw.choice([{}, {}, {"momentum": 0.0}, {"nesterov": False}, {"lr": 0.3, "momentum": 0.5}]),
        "shard_mib": 1,
    }
    chance = random.Random(f"few bits {seed}")  # of its own: the other draws of a seed stay as they are
    few_bits = chance.random() < 0.25
    if few_bits:
        settings["codec"] = chance.choice(["2bit", "topk64"])
    if settings["codec"] == "topk64" and aggregate == "mean" and chance.random() < 0.5:
        settings["aggregate"] = aggregate = "contributors_mean"
    plan = plan_of(seed, replicas, rounds, **settings)
    if plan.strict:  # whose bits are only those of the undisturbed run if every state is saved
        plan = replace(plan, settings={**plan.settings, "replica_state": "round"})
    elif aggregate in ("mean", "agreeing_mean") and random.Random(f"equal time {seed}").random() < 0.2:
        plan = replace(plan, settings={**plan.settings, "steps": "equal_time"})
    length = 5.0 * STEP_S * 4 * rounds

    def when() -> float:
        return round(draw.uniform(0.5, length), 2)

    def which() -> int:
        return draw.randrange(replicas)

    def sometimes(share: float, made: Any) -> tuple[Any, ...]:
        return (made(),) if draw.random() < share else ()

    def span(longest: float) -> tuple[float, float]:
        return (begin := when()), round(begin + draw.uniform(1.0, longest), 2)

    lone_group = replicas >= 3 and not plan.strict  # where a machine with other bits is outnumbered, and not needed
    ample = draw.random() < 0.04 and replicas <= 4  # more than one payload shard, which takes a second of real time
    wide = replace(
        plan,
        width=140_000 if ample else max(draw.choice([1, 1, 5]), 5 * few_bits),
        buffer=draw.random() < 0.2,
        tokens=tuple(draw.choice([1, 2, 3, 100]) for _ in range(replicas)) if by_tokens else (),
        next_leg=NextLeg(
            rounds=draw.randint(1, 3),
            lr=draw.choice([None, 0.5]),
            kills=tuple((round(draw.uniform(0.5, 40.0), 2), draw.randint(-2, replicas - 1)) for _ in range(2)),
        )
        if draw.random() < 0.25
        else None,
        no_network=sometimes(0.1, lambda: span(draw.choice([30.0, 900.0]))),
        coordinators=sometimes(0.2, when),
        vendor_down=sometimes(0.1, lambda: span(draw.choice([30.0, 900.0]))),
        no_machine=sometimes(0.1, lambda: (*span(60.0), which())),
        full=sometimes(0.04, lambda: span(30.0)),
        rots=sometimes(0.06, lambda: (when(), draw.randint(1, rounds), which())),
        lost_payloads=sometimes(0.06, lambda: (draw.randint(1, rounds), which())),
        no_commits=sometimes(0.05, lambda: (draw.randint(1, rounds), b"\x00garbage")),
        reports_s=sometimes(0.05, lambda: (which(), draw.choice([0.0, 5e6]))),
        forged=sometimes(0.08, lambda: (draw.randint(1, rounds), which())),
        other_arithmetic=sometimes(0.08, which) if lone_group else (),
    )
    stale_s = random.Random(f"stale {seed}").choice([0.0, 0.0, 0.0, 2.0, 10.0])
    wide = replace(wide, stale_s=stale_s)
    draw = random.Random(f"wider {seed}")  # so that what was drawn above stays as it was
    plain = plan.settings["fragments"] == 1 and not plan.settings["fragment_update_alpha"] and aggregate == "mean"
    if plain and draw.random() < 0.3:
        wide = replace(wide, settings={**wide.settings, "adapters": "exact"})
    if draw.random() >= 0.2:
        return wide
    machines = replicas + draw.choice([0, 0, 1, 2])

    def some_machines() -> tuple[tuple[float, int], ...]:
        return tuple((when(), draw.randrange(machines + 2)) for _ in range(draw.randint(0, 2)))

    return replace(wide, machines=machines, machine_kills=some_machines(), machine_notices=some_machines())


CALM = Plan(seed=1, replicas=3, rounds=4, settings={"quorum": None, "sync_every": 4}, paces=(1.0, 1.0, 1.0))


def calm(**changes: Any) -> Plan:
    """Three replicas and four rounds without misfortunes, but for `changes`; `settings` are added."""
    settings = {"fragments": 1, "fragment_sync_delay": 0, "late": "carry", "snapshot_every": 2, "retention": {}}
    return replace(CALM, **{**changes, "settings": {**settings, **CALM.settings, **changes.get("settings", {})}})


def islands_of(seed: int) -> Plan:
    """A run of replicas of two and three ranks, or one, of which any may be killed or stopped, drawn from the seed."""
    draw = random.Random(f"islands {seed}")
    replicas = draw.choice([1, 2, 2, 3])
    ranks = [draw.choice([1, 2, 2, 3]) for _ in range(replicas)]
    plan = plan_of(seed, replicas, draw.choice([3, 4]), ranks_per_replica=ranks, weights="uniform")
    length = 4.5 * STEP_S * plan.settings["sync_every"] * plan.rounds

    def which() -> tuple[float, int, int]:
        replica_id = draw.randrange(replicas)
        return round(draw.uniform(0.5, length), 2), replica_id, draw.randrange(ranks[replica_id])

    stops = [(*which(), round(draw.uniform(5.0, 90.0), 1)) for _ in range(draw.randint(0, 1))]
    return replace(plan, rank_kills=tuple(which() for _ in range(draw.randint(1, 3))), rank_stops=tuple(stops))


def flips_of(seed: int) -> Plan:
    """A run in which one or two bits flip anywhere and at any time, with a kill in some, all drawn from the seed."""
    draw = random.Random(f"flips {seed}")
    replicas, rounds = draw.choice([1, 2, 2, 3, 4]), draw.choice([4, 6, 8])
    fragments, delay = draw.choice([(1, 0), (1, 0), (1, 1), (2, 0), (2, 1)])
    length = 4.5 * rounds + 8.0
    settings = {
        "quorum": draw.choice([None, None, "all", 1]),
        "fragments": fragments,
        "fragment_sync_delay": delay,
        "sync_every": 4 * fragments,
        "snapshot_every": draw.choice([1, 2, 3]),
    }

    def when() -> float:
        return round(draw.uniform(8.0, length), 2)

    flips = [(when(), draw.randrange(replicas), draw.choice(FLIPS))]
    if draw.random() < 1 / 3:
        flips.append((flips[0][0] + HEALED_S, draw.randrange(replicas), draw.choice(FLIPS)))
    return calm(
        seed=seed,
        replicas=replicas,
        rounds=rounds,
        paces=tuple(draw.choice([1.0, 1.0, 1.05, 1.3]) for _ in range(replicas)),
        settings=settings,
        flips=tuple(flips),
        kills=tuple((when(), draw.randrange(replicas)) for _ in range(draw.choice([0, 0, 1]))),
    )


def forged_plan_of(seed: int) -> Plan:
    """The plain run of a seed in which somebody with a key to the bucket forges well-formed records."""
    plan, draw = plan_of(seed), random.Random(f"forged {seed}")
    length = 5.0 * STEP_S * 4 * plan.rounds

    def forgery() -> tuple[float, str, int]:
        return round(draw.uniform(0.5, length), 2), draw.choice(FORGERIES), draw.randrange(plan.replicas)

    return replace(plan, forgeries=tuple(forgery() for _ in range(draw.randint(1, 4))))


def scaled_plan_of(seed: int) -> Plan:
    """A run that is scaled up and down at random while replicas are killed, told to leave and find no machines."""
    draw = random.Random(f"scaled {seed}")
    replicas, most_replicas = draw.choice([(1, 3), (1, 4), (2, 6), (2, 8), (1, 16)])
    rounds = draw.choice([6, 8, 12])
    settings = {"max_replicas": most_replicas, "quorum": draw.choice([None, None, 1]), "replica_state": None}
    plan = plan_of(seed, replicas, rounds, **settings)
    length = 6.0 * STEP_S * 4 * rounds

    def when() -> float:
        return round(draw.uniform(1.0, length), 2)

    def ids(most: int) -> tuple[tuple[float, int], ...]:
        return tuple((when(), draw.randrange(most_replicas)) for _ in range(draw.randint(0, most)))

    whole = (
        (round(0.2 * length, 2), most_replicas),
        (round(0.5 * length, 2), replicas),
        (round(0.7 * length, 2), most_replicas),
    )
    some = tuple(sorted((when(), draw.randint(replicas, most_replicas)) for _ in range(draw.randint(1, 5))))
    machines = draw.choice([0, 0, 0, most_replicas - 1, most_replicas])
    return replace(
        plan,
        paces=tuple(STEP_S * draw.choice([1.0, 1.0, 1.05, 1.3]) for _ in range(most_replicas)),
        scales=whole if draw.random() < 0.4 else some,
        kills=tuple((when(), draw.randint(-2, most_replicas - 1)) for _ in range(draw.randint(0, 3))),
        notices=ids(2),
        lies=ids(1),
        stops=(),
        flips=(),
        collapse=False,
        halt_at=None,
        corrupt_payloads=(),
        no_machine=((when(), length, draw.randrange(most_replicas)),) if draw.random() < 0.2 and not machines else (),
        coordinators=(when(),) if draw.random() < 0.3 else (),
        machines=machines,
        machine_kills=ids(1) if machines else (),
        next_leg=NextLeg(rounds=draw.randint(2, 4), replicas=draw.choice([None, 1, 2, most_replicas]))
        if draw.random() < 0.3
        else None,
        refused=tuple(draw.sample(range(most_replicas), draw.choice([0, 0, 0, 1, 1, 2]))),
    )
