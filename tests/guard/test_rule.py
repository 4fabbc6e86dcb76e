"""The first rule, `HeldOutRule`, in the fold: its states and verdicts have the bytes of version 0.3.0."""

import hashlib
import json
import math
import random
from dataclasses import asdict

from diloco_orchestrator.config import GuardConfig
from diloco_orchestrator.guard import RoundReports, fold
from diloco_orchestrator.protocol.records import Metric, Score
from diloco_orchestrator.protocol.start_records import HeldoutSet

# The states and verdicts of version 0.3.0 for the rounds below.
GOLDEN = "c2cf69adfba9742e9bd6a3d1ebb305e1b5818c39f3f27247fbdd91fa8587b351"


HELDOUT = HeldoutSet(metric="loss", shares=(10,) * 4, digest="0" * 64)


def test_the_first_rule_writes_the_bytes_it_always_wrote():
    rng = random.Random(5)
    config = GuardConfig(rule="heldout", min_steps=3)
    state, digest = None, hashlib.sha256()
    for round_ in range(1, 41):
        sums = {
            share: None if rng.random() < 0.03 else -20 - share + 0.1 * round_ + rng.random()
            for share in range(4)
            if rng.random() < 0.8
        }
        none = rng.random() < 0.05
        in_loop = None if none else Metric(sum=None if rng.random() < 0.05 else -60.0 + round_, count=30)
        result = fold(
            state,
            config,
            HELDOUT,
            RoundReports(
                round_,
                scores=[Score(share=share, sum=total, count=10) for share, total in sums.items()],
                in_loop={0: in_loop} if in_loop else {},
                kl_to_init=rng.choice([None, 0.01, math.nan]),
                entropy=rng.choice([None, 1.5]),
                reward_std=rng.choice([None, 0.2]),
            ),
        )
        said = asdict(result.verdict)
        assert [said.pop(name) for name in ("action", "rollback_to", "replica", "heldout_root")] == [None] * 4
        digest.update(json.dumps([result.state, said], sort_keys=True).encode())
        state = json.loads(json.dumps(result.state))
    assert "rule" not in state and result.verdict.fire and digest.hexdigest() == GOLDEN
