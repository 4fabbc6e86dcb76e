"""Agreeing mean, trimmed mean and median of contributions: what is left out, and bits that do not depend on order,
blocks or machine."""

import random

import pytest
import torch
from parts_of_a_mean import declared, part

from diloco_orchestrator.allreduce import agreement
from diloco_orchestrator.allreduce.aggregate import AGGREGATES, _network, aggregate_of, sorted_rows, trimmed
from diloco_orchestrator.allreduce.agreement import summary
from diloco_orchestrator.allreduce.mean import Part
from diloco_orchestrator.allreduce.shards import shard_ranges
from diloco_orchestrator.allreduce.vectors import BLOCK
from diloco_orchestrator.codecs.table import Encoded, encode
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.digests import bulk_digest

GOLDEN = [
    "b3:23efbb9ba2c314644e714d85e47917f9d3852d98527394bbf06777bc94d536fa",
    "b3:fcea6f269cf102837d685359ee03314f1dfc0e687f00b09289d676e1503c414d",
]


GOLDEN_CONTRIBUTORS = "b3:4b3f181b3784ef24c6c0ade9740f665a2eb3a8cbead312dd68071e2cd16e7d30"
GOLDEN_AGREEING = "b3:78f22e4f1f42cfb77dd284076c72c3079c9b83baca609854b4f6b833d7751249"
AGREEMENTS = [-0.253118, -0.292209, -0.297788, -0.296636, -0.296636, -0.296033, -0.246643]


def aggregated(how: str, parts: list[Part], numel: int, shard_numel: int = 4) -> torch.Tensor:
    lengths = [min(shard_numel, numel - start) for start in range(0, numel, shard_numel)]
    aggregate = aggregate_of(how, parts, lengths)
    return torch.cat(
        [block.clone() for index, numel in enumerate(lengths) for block in aggregate.shard(index)(0, numel)]
    )


def agreements(values: list[torch.Tensor], codec: str = "fp32") -> list[float | None]:
    encoded = [Encoded(encode(value, codec), codec, value.numel()) for value in values]
    return agreement.agreements(encoded, [declared(value) for value in values])


def parts_of(*rows: list[float]) -> list[Part]:
    return [part(i, torch.tensor(row)) for i, row in enumerate(rows)]


@pytest.mark.parametrize("count", range(1, 18))
def test_the_network_sorts_every_row_count(count):
    """By the 0-1 principle a network that sorts all inputs of zeros and ones sorts everything; here some of them."""
    draw = random.Random(count)
    for _ in range(50):
        values = [draw.randint(0, 1) for _ in range(count)]
        for low, high in _network(count):
            values[low], values[high] = sorted((values[low], values[high]))
        assert values == sorted(values)


@pytest.mark.parametrize("how", AGGREGATES)
def test_a_part_of_weight_zero_counts_in_no_aggregate(how):
    rows = [part(i, torch.randn(9, generator=torch.Generator().manual_seed(i)), float(i > 0), 9) for i in range(6)]
    assert torch.equal(aggregated(how, rows, 9, 9), aggregated(how, rows[1:], 9, 9))


def test_rows_are_sorted_coordinate_by_coordinate():
    rows = torch.randn(7, 33, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.stack(sorted_rows(list(rows.clone()))), rows.sort(dim=0).values)


@pytest.mark.parametrize(
    ("how", "kept"),
    [  # how many values of a coordinate are kept, of 1, 2, 3, … contributions
        ("mean", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("median", [1, 2, 1, 2, 1, 2, 1, 2, 1]),
        ("trimmed_mean", [1, 2, 1, 2, 3, 4, 5, 4, 5]),
    ],
)
def test_a_round_with_few_contributions_leaves_out_as_many_as_it_can(how, kept):
    assert [count - 2 * trimmed(how, count) for count in range(1, 10)] == kept


def test_extremes_of_a_coordinate_are_left_out():
    parts = parts_of([1.0, -1e30, 3.0], [2.0, 1.0, 1.0], [3.0, 2.0, 7.0], [4.0, 3.0, 5.0], [1e30, 9.0, -1e30])
    assert aggregated("median", parts, 3).tolist() == [3.0, 2.0, 3.0]
    assert aggregated("trimmed_mean", parts, 3).tolist() == [3.0, 2.0, 3.0]
    four = parts[:4]
    assert aggregated("median", four, 3).tolist() == [2.5, 1.5, 4.0] == aggregated("trimmed_mean", four, 3).tolist()


def test_every_contribution_counts_once_and_a_clipped_one_is_scaled():
    rows = [torch.tensor([value]) for value in (1.0, 2.0, 3.0, 80.0, -80.0)]
    parts = [part(i, row, 0.05 if row.abs() > 3 else 1.0) for i, row in enumerate(rows)]
    assert aggregated("median", parts, 1).item() == 2.0
    assert aggregated("trimmed_mean", parts, 1).item() == 2.0
    assert aggregated("median", parts[2:], 1).item() == 3.0  # of 3, 4 and -4


def test_bits_depend_neither_on_order_nor_on_blocks():
    """Negative zero included: what is equal has the same bits however it is sorted."""
    numel = BLOCK + 5
    values = [torch.randn(numel, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    values[0][:4], values[1][:4], values[2][:4] = -0.0, 0.0, -0.0
    parts = [part(i, each, shard_numel=numel) for i, each in enumerate(values)]
    for how in ("median", "trimmed_mean"):
        found = aggregated(how, parts, numel, numel)
        again = aggregated(how, [part(5 - i, each, shard_numel=numel) for i, each in enumerate(values)], numel, numel)
        small = torch.cat([aggregated(how, [part(i, v[:9]) for i, v in enumerate(values)], 9), found[9:]])
        assert torch.equal(found.view(torch.int32), again.view(torch.int32))
        assert torch.equal(found.view(torch.int32), small.view(torch.int32))


def test_the_bits_are_golden():
    index = torch.arange(4099, dtype=torch.int64)
    values = [((index * 2654435761 + i * 40503) % 65521 - 32760).to(torch.float32) / 3.0 for i in range(7)]
    parts = [part(i, each, 0.37 if i == 3 else 1.0, 4099) for i, each in enumerate(values)]
    digests = [bulk_digest(aggregated(how, parts, 4099, 4099).numpy().tobytes()) for how in ("median", "trimmed_mean")]
    assert digests == GOLDEN


# -- those that agree -------------------------------------------------------------------------------------------------


def directions(*signs: float, numel: int = 50, noise: float = 0.3) -> list[torch.Tensor]:
    """A common direction times each sign, with noise of their own."""
    draw = torch.Generator().manual_seed(5)
    common = torch.randn(numel, generator=draw)
    return [sign * common + noise * torch.randn(numel, generator=draw) for sign in signs]


@pytest.mark.parametrize(
    ("signs", "out"),
    [
        ((1, 1, 1, -1), [3]),
        ((-3, 1, 1, 1, 1), [0]),
        ((1, -50, 1, 1, 1, 1, -0.01, 1), [1, 6]),  # whatever their norm
        ((1, 1, 0, 1, -1), [4]),  # zeros have no direction, and are not judged
        ((1, 1, -1), []),
        ((0, 0, 0, 0), []),
    ],
)
def test_the_quarter_that_agrees_least_is_left_out(signs, out):
    values = [value if sign else torch.zeros(50) for sign, value in zip(signs, directions(*signs), strict=True)]
    parts = [part(i, value, 2.0 if i == 0 else 1.0, 50) for i, value in enumerate(values)]
    found = aggregate_of("agreeing_mean", parts, [50])
    mean = torch.cat([block.clone() for block in found.shard(0)(0, 50)])
    kept = aggregate_of("mean", [each for each in parts if each.replica_id not in out], [50])
    assert torch.equal(mean, torch.cat([block.clone() for block in kept.shard(0)(0, 50)]))
    assert sorted(each.replica_id for each in found.left_out) == out
    for each in found.left_out:
        assert each.agreement < 0.2 < 0.8 < each.usual


def test_each_shard_has_its_own_choice():
    values = directions(1, 1, 1, 1, numel=80)
    values[2][40:] *= -1.0
    values[0][:40] *= -1.0
    found = aggregate_of("agreeing_mean", [part(i, v, shard_numel=40) for i, v in enumerate(values)], [40, 40])
    for index in range(2):
        assert list(found.shard(index)(0, 40))
    assert [(each.shard, each.replica_id) for each in found.left_out] == [(0, 0), (1, 2)]
    said = summary([*found.left_out, *found.left_out[:1]], 7)
    assert [(each.replica_id, each.round, each.shards) for each in said] == [(0, 7, 2), (2, 7, 1)]
    assert (
        said[0].reason
        == f"its direction agrees with most others' by {said[0].agreement:.2f}, where {said[0].usual:.2f} "
        "is the median, in 2 shards"
    )


def test_agreements_are_cosines():
    values = directions(1, 1, -1, 0.5, 1, numel=2000, noise=2.0)
    unit = torch.nn.functional.normalize(torch.stack(values).double(), dim=1)
    cosines = unit @ unit.T
    for i, found in enumerate(agreements(values)):
        others = sorted(float(cosines[i, j]) for j in range(5) if j != i)
        assert found == pytest.approx(others[1], abs=0.01)  # the lower median of four


@pytest.mark.parametrize("scale", [2.0**-116, 2.0**-30, 1.0, 2.0**120])
def test_agreements_depend_neither_on_scale_nor_on_codec(scale):
    values = [torch.round(value * 8) for value in directions(1, 1, -1, 1, noise=1.0)]
    usual = agreements(values)
    assert agreements([value * scale for value in values]) == usual
    assert agreements(values, "bf16") == usual


def test_agreements_are_the_same_in_whatever_order_is_summed():
    """Numbers of very different size, whose float32 sums of products differ by order."""
    numel = 3 * 16 * 1024 + 7
    draw = torch.Generator().manual_seed(9)
    sizes = [10.0 ** torch.randint(-6, 6, (numel,), generator=draw) for _ in range(4)]
    values = [torch.randn(numel, generator=draw) * size for size in sizes]
    order = torch.randperm(numel, generator=draw)
    assert agreements([value[order] for value in values]) == agreements(values)


def test_autocast_around_a_training_loop_changes_no_agreement():
    values = directions(1, 1, -1, 0.5, numel=5000, noise=2.0)
    usual = agreements(values)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert agreements(values) == usual


def test_the_bits_of_the_agreeing_mean_are_golden():
    index = torch.arange(4099, dtype=torch.int64)
    values = [((index * (2654435761 + 2 * i) + i * 40503) % 65521 - 32760).to(torch.float32) / 3.0 for i in range(7)]
    found = aggregated("agreeing_mean", [part(i, each, 1.0 + i, 4099) for i, each in enumerate(values)], 4099, 4099)
    assert bulk_digest(found.numpy().tobytes()) == GOLDEN_AGREEING
    assert [round(each or 0.0, 6) for each in agreements(values)] == AGREEMENTS


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"replicas": 3}, 'aggregate="median" with replicas=3: .* Take 4 replicas or more, or "mean"'),
        ({"weights": "tokens"}, 'weights="tokens": each contribution counts once there'),
        ({"adapters": "exact"}, 'aggregate="mean", or adapters="mean"'),
    ],
)
def test_a_run_that_cannot_have_it_is_refused_in_words(settings, words):
    with pytest.raises(ConfigError, match=words):
        make_config({"entrypoint": "m:f", "aggregate": "median", **settings})


def test_the_agreeing_mean_weighs_by_tokens():
    make_config({"entrypoint": "m:f", "aggregate": "agreeing_mean", "weights": "tokens", "replicas": 4})


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="median"):
        make_config({"entrypoint": "m:f", "aggregate": "medain"})
    with pytest.raises(ConfigError, match=r"'medain'.*median"):
        aggregate_of("medain", [], [])


# -- the mean over contributors ---------------------------------------------------------------------------------------


def test_an_element_is_averaged_over_those_that_sent_it():
    """Of four elements a sparse codec sends one: the first is sent by two replicas, the second by one."""
    rows = [[9.0, 1.0, 0.0, 0.0], [3.0, -1.0, 2.0, 0.0], [1.0, 5.0, 0.0, 0.0]]
    parts = [part(i, torch.tensor(row), (1.0, 2.0, 2.0)[i], 4, "topk64") for i, row in enumerate(rows)]
    assert aggregated("contributors_mean", parts, 4).tolist() == [5.0, 5.0, 0.0, 0.0]
    assert aggregated("mean", parts, 4).tolist() == [3.0, 2.0, 0.0, 0.0]


def test_a_zero_that_a_codec_sends_counts():
    """By other codecs than the sparse ones, and in the spans of a sparse shard that travel in int8."""
    zero, one = torch.tensor([0.0, 0.0, 4.0, 0.0]), torch.tensor([2.0, 0.0, 0.0, 4.0])
    plain = [part(0, zero), part(1, one)]
    assert aggregated("contributors_mean", plain, 4).tolist() == [1.0, 0.0, 2.0, 2.0]
    fine = [part(i, row, 1.0, 4, "topk64", [(0, 1)]) for i, row in enumerate((zero, one))]
    assert aggregated("contributors_mean", fine, 4).tolist() == [1.0, 0.0, 4.0, 4.0]


def test_the_bits_of_the_mean_over_contributors_are_golden():
    numel = 2 * BLOCK + 4097
    rows = [torch.randn(numel, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    parts = [part(i, row, 1.0 + i, BLOCK + 4096, "topk64", [(4000, 9000)]) for i, row in enumerate(rows)]
    found = aggregated("contributors_mean", parts, numel, BLOCK + 4096)
    assert bulk_digest(found.numpy().tobytes()) == GOLDEN_CONTRIBUTORS
    cut = list(enumerate(shard_ranges(numel, BLOCK + 4096)))
    values = torch.stack(
        [torch.cat([Encoded(p.read(k), "topk64", b - a).values() for k, (a, b) in cut]) for p in parts]
    )
    sent = (values != 0).double()
    for start in (0, BLOCK + 4096):
        sent[:, start + 4000 : start + 9000] = 1.0
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)[:, None]
    total = (sent * weights).sum(0)
    wanted = (values.double() * weights).sum(0) / total.clamp(min=1.0)
    assert torch.allclose(found.double(), wanted, atol=1e-6)
