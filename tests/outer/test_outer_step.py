"""The outer step: the paper's arithmetic, and the same bits on every kind of CPU."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from blake3 import blake3

from diloco_orchestrator.allreduce.aggregate import aggregate_of
from diloco_orchestrator.allreduce.mean import EncodedShards, Part, encoded_shard, mean_into
from diloco_orchestrator.allreduce.vectors import BLOCK
from diloco_orchestrator.codecs.table import LARGEST_GROUP, encode
from diloco_orchestrator.config import OuterConfig
from diloco_orchestrator.outer.arithmetic import nesterov_step
from diloco_orchestrator.outer.base import Base, NamedVector
from diloco_orchestrator.outer.golden_arithmetic import GOLDEN, GOLDEN_AGGREGATES, GOLDEN_EDGES
from diloco_orchestrator.outer.outer_step import Nesterov, average_and_step, step, step_in_place
from diloco_orchestrator.protocol.digests import bulk_digest
from diloco_orchestrator.protocol.records import Contribution, Payload, Shard

OUTERS = [
    OuterConfig(),
    OuterConfig(nesterov=False),
    OuterConfig(lr=1.0, momentum=0.0),
    OuterConfig(lr=0.1, momentum=0.5),
]


def torch_outer(parameter: torch.nn.Parameter, outer: OuterConfig) -> torch.optim.SGD:
    nesterov = outer.nesterov and outer.momentum > 0
    return torch.optim.SGD([parameter], lr=outer.lr, momentum=outer.momentum, nesterov=nesterov)


@pytest.mark.parametrize("outer", OUTERS, ids=str)
def test_ours_and_torchs_agree_over_many_steps(outer: OuterConfig):
    start = torch.randn(40, generator=torch.Generator().manual_seed(0))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    our_optimizer, their_optimizer = Nesterov([ours], outer), torch_outer(theirs, outer)
    base = Base.fresh({"w": start}, outer)
    for seed in range(20):
        gradient = torch.randn(40, generator=torch.Generator().manual_seed(seed))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        our_optimizer.step()
        their_optimizer.step()
        base = step(base, {"w": gradient}, outer)
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert torch.equal(ours, base.parameters["w"])  # the optimizer and the pure form: the same bits
    if outer.momentum:
        assert torch.allclose(
            our_optimizer.state[ours]["momentum_buffer"], their_optimizer.state[theirs]["momentum_buffer"]
        )
        assert torch.equal(our_optimizer.state[ours]["momentum_buffer"], base.momenta["w"])


def test_the_first_step_by_hand():
    """m = g = 2; p' = 1 - 0.5 (2 + 0.5 * 2) = -0.5."""
    parameter, momentum, gradient = torch.tensor([1.0]), torch.zeros(1), torch.tensor([2.0])
    nesterov_step(parameter, momentum, gradient, OuterConfig(lr=0.5, momentum=0.5))
    assert (parameter.item(), momentum.item(), gradient.item()) == (-0.5, 2.0, 2.0)


@pytest.mark.parametrize("outer", OUTERS, ids=str)
@pytest.mark.parametrize("shard_numel", [BLOCK - 1, BLOCK + 1, 10**9])
def test_averaging_and_stepping_shard_by_shard_gives_the_bits_of_one_after_the_other(shard_numel, outer):
    generator = torch.Generator().manual_seed(3)
    shapes = {"a": (BLOCK,), "b": (3, 7), "c": (BLOCK + 5,)}
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    apart = Base.fresh(values, outer, [["a", "c"], ["b"]], shard_numel)
    together = apart.copy()
    for fragment, names in enumerate(apart.fragments):
        numel = apart.numel(names)
        named: list[tuple[Contribution, int]] = []
        bodies: dict[int, list[bytes]] = {}
        for replica_id in range(3):
            vector = torch.randn(numel, generator=generator)
            cut = vector.split(min(shard_numel, numel))
            bodies[replica_id] = [encode(shard, "bf16") for shard in cut]
            shards = tuple(Shard(digest=bulk_digest(data), size=len(data)) for data in bodies[replica_id])
            payload = Payload(codec="bf16", numel=numel, shard_numel=shard_numel, shards=shards)
            named.append((manifest_of(replica_id, payload), replica_id + 1))
        mean = [torch.empty(len(shard)) for shard in cut]
        mean_into(mean, [Part(m.replica_id, w, m.payload, bodies[m.replica_id].__getitem__) for m, w in named])
        step_in_place(apart, NamedVector(apart.shapes(names), mean), outer)
        read = partial(shard_of, bodies)
        average = average_and_step(together, fragment, named, read, outer, keep_average=fragment == 0).average
        assert together.digest() == apart.digest()
        assert list(average) == (list(names) if fragment == 0 else [])
        assert all(torch.equal(average[name], NamedVector(apart.shapes(names), mean)[name]) for name in average)


@pytest.mark.parametrize("outer", [*OUTERS, OuterConfig(lr=0.1, momentum=0.0)], ids=str)
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_averages_that_were_kept_encoded_give_the_bits_of_those_that_are_computed_now(codec, outer):
    """By scatter-reduce; of three contributions with weights, in two shards that do not end with a block."""
    generator, numel, shard_numel = torch.Generator().manual_seed(4), BLOCK + 9000, BLOCK + LARGEST_GROUP
    now = Base.fresh({"w": torch.randn(numel, generator=generator)}, outer, [["w"]], shard_numel)
    kept, named = now.copy(), list[tuple[Contribution, int]]()
    bodies: dict[int, list[bytes]] = {}
    for replica_id in range(3):
        cut = torch.randn(numel, generator=generator).split(shard_numel)
        bodies[replica_id] = [encode(shard, codec) for shard in cut]
        shards = tuple(Shard(digest=bulk_digest(data), size=len(data)) for data in bodies[replica_id])
        payload = Payload(codec=codec, numel=numel, shard_numel=shard_numel, shards=shards)
        named.append((manifest_of(replica_id, payload), replica_id + 1))
    parts = [Part(m.replica_id, w, m.payload, bodies[m.replica_id].__getitem__) for m, w in named]
    lengths = [len(shard) for shard in cut]
    averages = EncodedShards(lengths, codec)
    for index, length in enumerate(lengths):
        averages.put(index, encoded_shard(aggregate_of("mean", parts, lengths).shard(index), length, codec))
    how = {"fragment": 0, "named": named, "read": partial(shard_of, bodies), "outer": outer, "keep_average": True}
    expected = average_and_step(now, **how, codec=codec).average
    found = average_and_step(kept, **how, averages=averages).average
    assert kept.digest() == now.digest()
    assert torch.equal(found["w"], expected["w"])


def shard_of(bodies: dict[int, list[bytes]], manifest: Contribution, index: int) -> bytes:
    return bodies[manifest.replica_id][index]


def manifest_of(replica_id: int, payload: Payload) -> Contribution:
    return Contribution(
        write_id="test",
        at=0.0,
        round=1,
        leg=1,
        replica_id=replica_id,
        attempt=1,
        kind="delta",
        base_digest="",
        snapshot_round=0,
        rebuilt_after=0,
        payload=payload,
    )


def test_a_parameter_without_gradient_stays():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Nesterov([parameter], OuterConfig())
    optimizer.step()
    assert parameter.tolist() == [1, 1] and not optimizer.state


def test_a_base_has_memory_of_its_own_and_changes_when_a_step_is_taken_only():
    outer, start = OuterConfig(), torch.ones(3)
    base = Base.fresh({"w": start}, outer)
    before, copy = base.digest(), base.copy()
    start.zero_()
    moved = step(base, {"w": torch.ones(3)}, outer)
    assert base.digest() == before == copy.digest() != moved.digest()
    step_in_place(base, {"w": torch.ones(3)}, outer)
    assert base.digest() == moved.digest() and copy.digest() == before


def test_the_digest_covers_names_shapes_fragments_shard_size_values_and_momenta():
    outer = OuterConfig()
    base = Base.fresh({"a": torch.arange(4.0), "b": torch.zeros(1)}, outer)
    other = [
        Base.fresh({"a": torch.arange(4.0), "c": torch.zeros(1)}, outer),
        Base.fresh({"a": torch.arange(4.0).view(2, 2), "b": torch.zeros(1)}, outer),
        Base.fresh({"a": torch.arange(4.0) + 1e-6, "b": torch.zeros(1)}, outer),
        Base(base.parameters, {**base.momenta, "b": torch.full((1,), 1e-9)}),
        Base(base.parameters, {}),
        Base(base.parameters, base.momenta, [["a"], ["b"]]),
        Base(base.parameters, base.momenta, [["b", "a"]]),
        Base(base.parameters, base.momenta, shard_numel=4),
    ]
    digests = [each.digest() for each in [base, *other]]
    assert len(set(digests)) == len(digests)
    assert base.digest() == Base.fresh({"b": torch.zeros(1), "a": torch.arange(4.0)}, outer).digest()


def test_an_outer_step_of_one_fragment_leaves_parameters_and_momenta_of_the_others():
    outer = OuterConfig()
    base = Base.fresh({"a": torch.ones(2), "b": torch.ones(2)}, outer)
    base = step(base, {"a": torch.ones(2), "b": torch.ones(2)}, outer)
    moved = step(base, {"a": torch.ones(2)}, outer)
    assert torch.equal(moved.parameters["b"], base.parameters["b"])
    assert torch.equal(moved.momenta["b"], base.momenta["b"]) and moved.momenta["b"].tolist() == [1.0, 1.0]
    assert not torch.equal(moved.momenta["a"], base.momenta["a"])


def by_hand(base: Base) -> str:
    """The digest as docs/reference/protocol.md has it, from whole tensors."""
    layout = {
        "fragments": [[[name, list(base.parameters[name].shape)] for name in names] for names in base.fragments],
        "shard_numel": base.shard_numel,
    }
    lines = [json.dumps(layout, sort_keys=True, separators=(",", ":"))]
    lines[0] = "b3:" + blake3(lines[0].encode()).hexdigest()
    for names in base.fragments:
        vectors = [torch.cat([each[n].flatten() for n in names]) for each in (base.parameters, base.momenta) if each]
        for start in range(0, len(vectors[0]), base.shard_numel):
            cut = [vector[start : start + base.shard_numel].numpy().astype("<f4").tobytes() for vector in vectors]
            lines.append("b3:" + blake3(b"".join(cut)).hexdigest())
    return "b3:" + blake3("\n".join(lines).encode()).hexdigest()


SHAPES = {"a.weight": (5, 7), "a.bias": (7,), "scalar": (), "nothing": (0, 3), "z": (2, 3, 4)}


@pytest.mark.parametrize("fragments", [(), [["scalar", "z"], ["a.bias", "a.weight", "nothing"]]])
@pytest.mark.parametrize("shard_numel", [1, 6, 35, 1000])
@pytest.mark.parametrize("outer", [OuterConfig(), OuterConfig(lr=1.0, momentum=0.0)], ids=["nesterov", "plain"])
def test_a_base_has_the_same_values_however_it_is_cut_into_shards(fragments, shard_numel, outer):
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    moved = ["scalar", "z"]
    whole = Base.fresh(values, outer)
    cut = Base.fresh(values, outer, fragments, shard_numel)
    for _ in range(2):
        gradients = {name: torch.randn(SHAPES[name], generator=generator) for name in moved}
        whole = step(whole, gradients, outer)
        step_in_place(cut, gradients, outer)
        assert cut.digest() == by_hand(cut) and whole.digest() == by_hand(whole)
        assert all(torch.equal(cut.momenta[name], moved) for name, moved in whole.momenta.items())
    assert list(cut.parameters) == sorted(SHAPES)
    assert all(torch.equal(cut.parameters[name], whole.parameters[name]) for name in SHAPES)
    assert all(torch.equal(cut.parameters[name], values[name]) for name in set(SHAPES) - set(moved))
    copies = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    cut.copy_into(copies)
    assert cut.holds(copies) and not cut.holds({**copies, "a.bias": copies["a.bias"] + 1.0})


def digests_in_a_process(program: str, threads: int, **environ: str) -> list[str]:
    """What a process prints that computes golden digests. Flush-to-zero is a state of threads: each case has one.

    `set_num_threads` takes any number; of OMP_NUM_THREADS torch takes no more than the machine has cores.
    """
    path = os.pathsep.join(sys.path)
    given = {**os.environ, "PYTHONPATH": path, **environ}
    words = (
        f"import torch; torch.set_num_threads({threads})\nfrom diloco_orchestrator.outer.golden_arithmetic import *; "
    )
    done = subprocess.run([sys.executable, "-c", words + program], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "capability", [*(pytest.param(c, marks=pytest.mark.slow) for c in ("default", "avx512")), "avx2"]
)
@pytest.mark.parametrize("threads", [*(pytest.param(few, marks=pytest.mark.slow) for few in (1, 2)), 4])
def test_five_rounds_denormals_ties_and_huge_values_have_these_bits_on_every_cpu(capability, threads):
    """With fused multiply-add, which avx2 has and default has not, torch.optim.SGD gives two different digests."""
    program = "print(outer_steps_digest(), edge_cases_digest(), aggregates_digest())"
    found = digests_in_a_process(program, threads, ATEN_CPU_CAPABILITY=capability)
    assert found == [GOLDEN, GOLDEN_EDGES, GOLDEN_AGGREGATES]


@pytest.mark.slow  # test_golden_arithmetic.py has the same in one process
@pytest.mark.parametrize("threads", [1, 4])
def test_flush_to_zero_is_off_around_our_steps_and_on_again_after_them(threads):
    found = digests_in_a_process(
        "from diloco_orchestrator.outer.arithmetic import *; torch.set_flush_denormal(True);"
        "print(edge_cases_digest()); check_arithmetic(); print(flushes(), torch.get_num_threads())",
        threads,
    )
    assert found[0] != GOLDEN_EDGES and found[1:] == ["True", str(threads)]


def test_worker_threads_of_torch_that_flush_take_no_part():
    """They were started while flushing was on; switching it off reaches the calling thread only."""
    found = digests_in_a_process(
        "from diloco_orchestrator.outer.golden_arithmetic import _edges, _part\n"
        "torch.set_flush_denormal(True); torch.zeros(2**20).add_(1.0); torch.set_flush_denormal(False)\n"
        "check_arithmetic()\n"
        "values = _edges('denormal', 2**21); mean = torch.empty(2**21); mean_into([mean], [_part(0, values)])\n"
        "print(bool((values * 1.0 == 0.0).any()), torch.equal(mean, values))",
        threads=4,
    )
    assert found == ["True", "True"]
