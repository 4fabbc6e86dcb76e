"""A run on virtual time that is long enough for segments of its log, with crashes of the replicas that write them."""

import random
from dataclasses import replace

import pytest
from simulation import Simulation
from simulation_plan import plan_of

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.segments import list_segments, missing_segments


@pytest.mark.slow
def test_segments_of_a_run_with_crashes_agree_with_its_commits():
    plan = plan_of(3, replicas=2, rounds=104, quorum=None, fragments=1, sync_every=4, fragment_sync_delay=0)
    draw = random.Random(3)
    kills = tuple((draw.uniform(10.0, 600.0), draw.choice([0, 1, -2])) for _ in range(6))
    calm = replace(plan, kills=kills, notices=(), stops=(), storms=(), no_writes=(), lies=(), nan=(), halt_at=None)
    run = Simulation(replace(calm, collapse=False, corrupt_payloads=()))
    run.run()  # checks the invariants, and verifies the bucket
    written = list_segments(run.bucket)
    last = RunLog(run.bucket).commits()[-1].round
    assert last > 100 and not missing_segments(written, 100)
    for segment in written:
        if segment.kind == "commits":
            singles = (run.bucket.get(keys.commit(r)) for r in range(segment.first, segment.last + 1))
            assert run.bucket.get(str(segment)) == b"".join(singles)
