"""Golden digest: states, verdicts and names of what was left out stay the same bytes, rule by rule.

Runs in old buckets are verified by folding them again, so a change of these bytes would make them disagree.
"""

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard.per_replica import LocalGain, fold_local
from diloco_orchestrator.guard.registry import rule_of
from diloco_orchestrator.guard.round_fold import fold_round, vault_base
from diloco_orchestrator.protocol.records import Contribution, Metric, Score, VaultScore
from diloco_orchestrator.protocol.start_records import HeldoutSet, VaultSet

ITEMS = 10
SHAPES = (
    "healthy",
    "early collapse",
    "new low",
    "slow fall",
    "fast fall",
    "gap",
    "drift",
    "lucky",
    "broken",
    "silent",
    "runaway",
)
RULES: tuple[dict[str, Any], ...] = (
    {"rule": "sequential-v1"},
    {
        "rule": "sequential-v1",
        "min_steps": 12,
        "threshold": 6.0,
        "gap_sigmas": 2.0,
        "pause_after": 3,
        "vault_sigmas": 1.0,
    },
    {"rule": "heldout", "min_steps": 5, "decline_patience": 3},
    {"rule": "heldout", "max_proxy_real_gap": 0.3, "ema_alpha": 0.5, "rise_eps": 1e-3},
    {"rule": "off"},
)
V2: tuple[dict[str, Any], ...] = tuple({**each, "rule": "sequential-v2"} for each in RULES[:2])
V3: tuple[dict[str, Any], ...] = tuple({**each, "rule": "sequential-v3"} for each in RULES[:2])
V4: tuple[dict[str, Any], ...] = tuple({**each, "rule": "sequential-v4"} for each in RULES[:2])
NOW: tuple[dict[str, Any], ...] = tuple({**each, "rule": "sequential"} for each in RULES[:2])


def level(shape: str, t: int) -> tuple[float, float]:
    """Held-out score and training metric without noise."""
    rise = 0.2 - 1.6 / (8 + t)
    u = max(t - 22, 0)
    if shape == "early collapse":
        return (0.4 if t < 7 else 0.1), 0.4 + 0.05 * t
    if shape == "new low":
        climb = (0.176, 0.204, 0.355, 0.806, 0.895, 0.176, 0.013, 0.001)
        return (climb[t - 1] if t <= len(climb) else -0.001 * (t % 2)), 0.3
    falls = {"slow fall": 0.02, "fast fall": 0.1, "gap": 0.0}
    if shape in falls:
        return 0.4 + rise - falls[shape] * u, 0.4 + rise + 0.03 * u
    if shape == "lucky":
        return 0.4 + rise + (0.15 if 18 <= t < 30 else 0.0), 0.4 + rise
    return 0.4 + rise, 0.4 + rise


def manifest(rng: random.Random, replica: int, t: int, shape: str, trouble: float, asked: bool) -> Contribution:
    """What one replica says; `trouble`: the probability of each oddity."""

    def odd(times: float = 1.0) -> bool:
        return rng.random() < times * trouble

    def score(share: int, mean: float) -> Score:
        count = ITEMS - 1 if odd(0.3) else ITEMS
        return Score(share=share, sum=None if odd() or mean != mean else count * mean, count=count)

    held, trained = level(shape, t)
    wide = 0.0 if shape == "new low" else 0.03
    held, trained = held + rng.uniform(-wide, wide), trained + rng.uniform(-wide, wide)
    held = math.nan if shape == "broken" and t in (15, 30, 31) else held
    shares = [replica] + ([rng.randrange(4)] if odd(2) else [])
    scores = tuple(score(share, held + 0.1 * share + (5.0 if odd(0.3) else 0.0)) for share in shares)
    local = tuple(score(each.share, held + 0.05 + 0.1 * each.share - (2.0 if odd() else 0.0)) for each in scores)
    kl = {"drift": 0.00002 * t * t * t, "runaway": 0.005 if t < 40 else 0.005 + 0.01 * (t - 39)}.get(shape, 0.001 * t)
    metrics = {
        name: Metric(sum=None if odd(0.3) else value, count=1)
        for name, value in {
            "kl_to_init": kl,
            "entropy": 1.5 - 0.01 * t,
            "reward_std": 0.2,
            "extra.hacks": 0.01 * t,
        }.items()
        if not odd(2)
    }
    change = {"healthy": 0.5, "lucky": 0.3}.get(shape, -3.0) + rng.uniform(-0.3, 0.3)
    answer = VaultScore(share=replica, change=None if odd() else change, squares=None if odd() else 0.05, count=ITEMS)
    return Contribution(
        write_id=f"w{replica}",
        at=0.0,
        round=t,
        leg=1,
        replica_id=replica,
        attempt=1,
        kind="scores" if t == 60 else "delta",
        base_digest="b3:" + "0" * 64,
        snapshot_round=0,
        rebuilt_after=0,
        scores=() if odd(3) else scores,
        local_scores=local,
        in_loop=None
        if odd(2) or (shape == "silent" and 10 <= t < 20)
        else Metric(sum=None if odd() else 3 * trained, count=3),
        metrics=metrics,
        vault=(answer,) if asked and not odd(2) else (),
    )


def folds_of(
    rng: random.Random, settings: dict[str, Any], shape: str, trouble: float, vaulted: bool, first_form: bool
) -> list[Any]:
    """What the fold says in each round of one run, the state through JSON as in a commit.

    `first_form`: whether the run began with the first form of the per-replica guard.
    """
    earlier = settings["rule"].startswith("sequential-v")  # of runs that began when it was "sequential"
    config = GuardConfig(**{**settings, "rule": "sequential"} if earlier else settings)
    vault = VaultSet(shares=(ITEMS,) * 4, digest="1" * 64) if vaulted else None
    heldout = HeldoutSet(metric="reward", shares=(ITEMS,) * 4, digest="0" * 64, vault=vault)
    local = {"local": {}} if settings["per_replica"] and (earlier or first_form) else {}
    name = settings["rule"] if earlier else rule_of(config.rule).name
    state: dict[str, Any] | None = {"rule": name, **local} if earlier or local else None
    found: list[Any] = []
    for t in range(1, 61):
        roster = [i for i in range(4) if rng.random() > trouble] or [0]
        asked = vault_base(state) is not None
        said = [manifest(rng, i, t, shape, trouble, asked) for i in roster]
        if rng.random() < 0.5 * trouble:
            said = said[:1]
        result = fold_round(state, config, t, heldout, roster, said, said, rebuildable=rng.random() > 0.2)
        assert result is not None
        state = json.loads(json.dumps(result.state))
        rest = [result.quarantined, result.discounted]
        found.append([t, state, asdict(result.verdict), [[each.model_dump() for each in part] for part in rest]])
    return found


def digest_of(
    seed: int, every: int = 1, rules: Sequence[dict[str, Any]] = RULES, first_form: bool = False
) -> tuple[str, set[str]]:
    """The digest of a run of every n-th pair of a rule and a shape, and the words of their verdicts."""
    digest, words = hashlib.sha256(), set()
    pairs = [(settings, shape) for settings in rules for shape in SHAPES]
    for number, (settings, shape) in [*enumerate(pairs)][::every]:
        more = {"per_replica": number % 3 == 1, **({"max_extra": {"hacks": 0.2}} if number % 4 == 2 else {})}
        rng = random.Random(1000 * seed + number)
        trouble, vaulted = (0.0, 0.03, 0.15)[number % 3], (number + seed) % 2 == 0
        for row in folds_of(rng, {**settings, **more}, shape, trouble, vaulted, first_form):
            digest.update(json.dumps(row, sort_keys=True).encode())
            words |= {f"{row[2]['action']}: {row[2]['reason']}", f"warning: {row[2]['warning']}"}
    return digest.hexdigest(), words


def test_states_verdicts_and_names_have_the_bytes_that_they_always_had():
    assert digest_of(0, every=3)[0] == "841ab33d69728bb34669c1f81682aa26e723041f522b3a2a50e08bbd9b37408d"


def test_the_rules_that_were_the_default_before_have_the_bytes_that_they_had_then():
    assert digest_of(0, every=5, rules=V2)[0] == "8649e8857b9a73e9b8a3f939cf9568dddf6e4b59d37485874284f82cc5509e9d"
    digest = digest_of(0, every=5, rules=V3, first_form=True)[0]
    assert digest == "2506e1b9c6d8fb4608361a3acb8ba909bae4c0cb4045d11dabf6650983c9cdf1"
    digest = digest_of(0, every=5, rules=V4, first_form=True)[0]
    assert digest == "6c5f43a6e8bac46a450041de9f2907a1ca5f0a31ac354f4395ae0f44b8c31b71"


def test_the_default_rule_has_the_bytes_that_it_had_when_it_became_the_default():
    digest = digest_of(0, every=5, rules=NOW, first_form=True)[0]
    assert digest == "34243d43d0a87b31224d9c454a97876868d43f2d3daf8a3ac5fcb7a8b62f3e4e"


def test_the_per_replica_guard_has_the_bytes_that_it_had_when_its_present_form_began():
    digest, state = hashlib.sha256(), None
    for t in range(1, 61):
        gains = [
            LocalGain(i, (t * 37 + i * 101 + t * t * i) % 64 / 64 / t - (0.5 if i == 3 and t > 40 else 0.0))
            for i in range(5)
        ]
        state, quarantined = fold_local(state, gains)
        digest.update(json.dumps([state, [each.model_dump() for each in quarantined]], sort_keys=True).encode())
    assert digest.hexdigest() == "642565872b5766f9b915e137dd166be7194ed37ad27c6678d96f435517f3a6cf"
