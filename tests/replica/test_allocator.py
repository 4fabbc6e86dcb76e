"""What glibc does with memory that is freed between the ends of rounds, and while a round is closed."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS_OF_FIFTY_BLOCKS = """
import resource
from diloco_orchestrator.replica.rounds.allocator import returning_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        b"x" * 2**22  # 4 MiB, written and freed
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with returning_freed_memory():
    with returning_freed_memory():
        pass
    closing = faults()
faults()
print(closing, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
@pytest.mark.parametrize(
    ("users", "kept"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "1048576"}, False)], ids=["ours", "the user's own"]
)
def test_blocks_freed_by_an_inner_step_are_used_again_by_the_next_one_and_returned_while_a_round_is_closed(users, kept):
    """A block that was returned costs 1,024 page faults when it is written again."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environ |= {"PYTHONPATH": os.pathsep.join(sys.path), **users}
    ran = subprocess.run([sys.executable, "-c", FAULTS_OF_FIFTY_BLOCKS], env=environ, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    closing, training = map(int, ran.stdout.split())
    assert closing > 40_000
    assert training < 2_000 if kept else training > 40_000
