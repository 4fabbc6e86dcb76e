"""Prices of machines in US dollars an hour: dated tables, for providers that report none or cannot be reached.

A table names the provider's page or file that its prices were checked against; prices without such a source are shown
as unconfirmed. Users with other prices, by contract or in another region, pass `hourly_usd=` to the executor. Spot
prices change by the hour and are in no table: `eks_jobs` requests them from AWS.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date

ANY_RANKS = 0  # in place of a number of ranks: whatever it is


@dataclass(frozen=True)
class Price:
    """The price of one replica's machine in US dollars an hour, and where it was found."""

    hourly_usd: float
    source: str  # who says so, and when: for people
    tflops: float | None = None  # of one of its GPUs, by `listed_tflops`; None: not known


@dataclass(frozen=True)
class PriceTable:
    """On-demand prices of a provider, copied from its list on the day `as_of`."""

    name: str
    url: str  # where today's are
    as_of: date
    usd: Mapping[str, float]
    confirmed_by: str = ""  # the provider's own words with these prices, as of that day; empty: none was at hand

    def price(self, what: str) -> Price | None:
        """The price of a kind of machine, or None if the table lacks it."""
        found = self.usd.get(what)
        return None if found is None else Price(found, self.source, listed_tflops(what))

    @property
    def source(self) -> str:
        return f"{self.name} as of {self.as_of:%Y-%m-%d}" + ("" if self.confirmed_by else ", unconfirmed")


HF_JOBS = PriceTable(
    "Hugging Face's list of hardware",
    "https://huggingface.co/docs/hub/jobs-pricing",
    date(2026, 11, 1),
    {
        "cpu-basic": 0.01,
        "cpu-upgrade": 0.03,
        "cpu-xl": 1.00,
        "cpu-performance": 1.90,
        "t4-small": 0.40,
        "t4-medium": 0.60,
        "l4x1": 0.80,
        "l4x4": 3.80,
        "l40sx1": 1.80,
        "l40sx4": 8.30,
        "l40sx8": 23.50,
        "a10g-small": 1.00,
        "a10g-large": 1.50,
        "a10g-largex2": 3.00,
        "a10g-largex4": 5.00,
        "a100-large": 2.50,
        "a100x4": 10.00,
        "a100x8": 20.00,
        "h200": 5.00,
        "h200x2": 10.00,
        "h200x4": 20.00,
        "h200x8": 40.00,
        "rtx-pro-6000": 2.75,
        "rtx-pro-6000x2": 5.50,
        "rtx-pro-6000x4": 11.00,
        "rtx-pro-6000x8": 22.00,
    },
    # The source of that page; the file itself has no date.
    "https://github.com/huggingface/hub-docs/blob/0b8c07f8210e1214ea5ce2fc4fbc2050d0b42e89/docs/hub/jobs-pricing.md",
)

# A GPU is billed by the second while its Sandbox runs; here times 3600. All Sandboxes are preemptible. Modal's own page
# of prices was not at hand: several others copied these from it in 2026, the last in October.
MODAL = PriceTable(
    "Modal's price list",
    "https://modal.com/pricing",
    date(2026, 6, 27),
    {
        "T4": 0.5904,
        "L4": 0.7992,
        "A10": 1.1016,
        "A10G": 1.1016,
        "L40S": 1.9512,
        "A100": 2.0988,
        "A100-40GB": 2.0988,
        "A100-80GB": 2.4984,
        "H100": 3.9492,
        "H200": 4.5396,
        "B200": 6.2496,
    },
)
# Beside the GPU; a Sandbox's cores and memory cost three times a Function's.
MODAL_CORE_USD, MODAL_GIB_USD = 0.1419, 0.0242
# Modal bills the larger of request and use (https://modal.com/docs/guide/resources), and a Sandbox that asks for none
# gets 0.125 cores. What a replica that trains uses in any case: the process keeps one core busy, and interpreter, torch
# and a model of a million parameters with AdamW take a third of a GiB (ru_maxrss), a larger model and CUDA more.
MODAL_CORES, MODAL_GIB = 1.0, 1.0
# Times the price in a region such as "us", such as "us-west" (https://modal.com/docs/guide/region-selection).
_MODAL_BROAD, _MODAL_NARROW = 1.5, 1.75

# US dollars an hour on demand of Linux in us-east-1, and GPUs: a replica pays for its share.
_EC2 = {
    "g4dn.xlarge": (0.526, 1),
    "g4dn.2xlarge": (0.752, 1),
    "g4dn.4xlarge": (1.204, 1),
    "g4dn.8xlarge": (2.176, 1),
    "g4dn.12xlarge": (3.912, 4),
    "g4dn.16xlarge": (4.352, 1),
    "g5.xlarge": (1.006, 1),
    "g5.2xlarge": (1.212, 1),
    "g5.4xlarge": (1.624, 1),
    "g5.8xlarge": (2.448, 1),
    "g5.12xlarge": (5.672, 4),
    "g5.16xlarge": (4.096, 1),
    "g5.24xlarge": (8.144, 4),
    "g5.48xlarge": (16.288, 8),
    "g6.xlarge": (0.8048, 1),
    "g6.2xlarge": (0.9776, 1),
    "g6.4xlarge": (1.3232, 1),
    "g6.8xlarge": (2.0144, 1),
    "g6.12xlarge": (4.6016, 4),
    "g6.16xlarge": (3.3968, 1),
    "g6.24xlarge": (6.6752, 4),
    "g6.48xlarge": (13.3504, 8),
    "g6e.xlarge": (1.861, 1),
    "g6e.2xlarge": (2.24208, 1),
    "g6e.4xlarge": (3.00424, 1),
    "g6e.8xlarge": (4.52856, 1),
    "g6e.12xlarge": (10.49264, 4),
    "g6e.16xlarge": (7.57719, 1),
    "g6e.24xlarge": (15.06559, 4),
    "g6e.48xlarge": (30.13118, 8),
    "g7e.2xlarge": (3.36312, 1),
    "g7e.4xlarge": (3.99816, 1),
    "g7e.8xlarge": (5.26824, 1),
    "p4d.24xlarge": (21.957642, 8),
    "p4de.24xlarge": (27.44705, 8),
    "p5.4xlarge": (6.88, 1),
    "p5.48xlarge": (55.04, 8),
    "p5en.48xlarge": (63.296, 8),
}
EC2_GPUS = {kind: gpus for kind, (_, gpus) in _EC2.items()}
EC2 = PriceTable(
    "EC2's on-demand prices in us-east-1",
    "https://aws.amazon.com/ec2/pricing/on-demand/",
    date(2026, 2, 9),
    {kind: usd for kind, (usd, _) in _EC2.items()},
    # Karpenter's copy of AWS's price list, which AWS generates and keeps: "generated at 2026-02-09 for us-east-1".
    "https://github.com/aws/karpenter-provider-aws/blob/265ee0ba5b8e337dec6b82dde965b03021ccb418"
    "/pkg/providers/pricing/zz_generated.pricing_aws.go",
)


# Dense BF16 TFLOPS of one GPU (FP16 of a T4) in NVIDIA's data sheets, by how the name of a kind of machine begins. They
# rank places until replicas have measured their speed, and have no other use.
_TFLOPS = {
    **dict.fromkeys(("t4", "g4dn."), 65.0),
    **dict.fromkeys(("a10", "g5."), 70.0),  # an A10G; AWS's page of G5
    **dict.fromkeys(("l4", "g6."), 121.0),
    **dict.fromkeys(("a100", "p4d.", "p4de."), 312.0),
    **dict.fromkeys(("l40s", "g6e."), 362.0),
    **dict.fromkeys(("rtx-pro-6000", "g7e."), 503.0),
    **dict.fromkeys(("h100", "h200", "p5.", "p5en."), 989.0),
    "b200": 2250.0,
}


def listed_tflops(kind: str) -> float | None:
    """Dense BF16 TFLOPS of one GPU of a kind of machine, such as "A100-80GB", "l4x4", "g6e.xlarge"; None if unknown."""
    known = [prefix for prefix in _TFLOPS if kind.lower().startswith(prefix)]
    return _TFLOPS[max(known, key=len)] if known else None


def modal_price(gpus: Sequence[str], cpu: float | None, memory_mib: int | None, regions: Sequence[str]) -> Price | None:
    """The price of a Modal Sandbox: its dearest GPUs, such as "A100:8", cores and memory, times the region's factor.

    None if a type is not in the table. Cores and memory are the requested ones, at least those that a replica uses;
    Modal bills use beyond the request too, which is not predicted here.
    """
    parts = [gpu.partition(":") for gpu in gpus]
    names = [name.rstrip("!").upper() for name, _, _ in parts]
    if any(name not in MODAL.usd for name in names):
        return None
    counts = [int(count or 1) for _, _, count in parts]
    machine = max((count * MODAL.usd[name] for name, count in zip(names, counts, strict=True)), default=0.0)
    cores, gib = max(cpu or 0.0, MODAL_CORES), max((memory_mib or 0) / 1024, MODAL_GIB)
    factor = 1.0 if not regions else _MODAL_NARROW if any("-" in region for region in regions) else _MODAL_BROAD
    usd = factor * (machine + cores * MODAL_CORE_USD + gib * MODAL_GIB_USD)
    counted = f"{cores:g} core{'s' * (cores != 1)} and {gib:g} GiB counted, more use costs more"
    slowest = min((listed_tflops(name) or 0.0 for name in names), default=0.0)
    return Price(round(usd, 4), f"{MODAL.source}, preemptible, {counted}", slowest or None)


def usd_by_ranks(hourly_usd: float | str | None) -> Mapping[int, float] | None:
    """The user's `hourly_usd` by the number of a replica's ranks, or under `ANY_RANKS`; None if none was given.

    Text is a number, or one for each number of ranks as in "8:24,1:3.5". Raises ValueError for anything else, and for a
    price below 0.
    """
    if hourly_usd is None:
        return None
    text = str(hourly_usd)
    parts = [each.partition(":") for each in text.split(",")]
    try:
        found = {int(ranks): float(usd) for ranks, _, usd in parts} if ":" in text else {ANY_RANKS: float(text)}
    except ValueError:
        found = {}
    ranks_are_said = len(found) == len(parts) and (":" not in text or min(found) > 0)
    if not ranks_are_said or not all(0 <= usd < math.inf for usd in found.values()):
        raise ValueError(
            f"hourly_usd={hourly_usd!r} is no number of US dollars an hour, 0 or more, nor one for each number of "
            'ranks as in "8:24,1:3.5".'
        )
    return found
