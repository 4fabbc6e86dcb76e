"""Published records of spot machines, for `fleet_markets`: how many there were, and what they cost.

`V100_MACHINES`: of four p3.2xlarge (one V100) that were asked for, how many ran, looked at every five minutes from 3
August 2023 on, by zone: github.com/skypilot-org/spot-traces, preemption/4-node (Wu et al., Can't Be Late, NSDI 2024).
The first days of us-west-2c and us-east-2a, of us-east-1f some days with machines. Read off by eye: changes are as
published, and runs of more than forty equal looks may be some looks longer or shorter.

`K80_MACHINES`: whether one p2.16xlarge (eight K80) was there, every ten minutes from 26 October 2022 on, in us-west-2a
(availability/1-node/aws-10-26-2022, the first eight days). `V100_RARE`: whether a p3.2xlarge was there, every 195
seconds from 15 February 2023 on, in us-east-1a (availability/1-node/aws-02-15-2023, some four days). Same source, read
off in the same way: of `V100_RARE` the times without a machine are rough.

`G2_USD`: US dollars an hour of a g2.8xlarge (four K520, $2.60 on demand) in us-east-1a on 25 April 2016, when bids made
the price, from 5:58 to 12:45 in minutes: github.com/hshazly/Amazon-Spot-Price-Estimator, history_db.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

LOOK_S = 300.0

_RUNS: Mapping[str, str] = {  # "4x28" is 28 looks at four machines
    "us-west-2c": """
        4x28 0x9 4x6 0x9 3 4x17 3 0 3 4x67 3 1 0x32 4x13 1 1 4x3 3 3 0x11 4x21 3 3 1 2 4x47 1 2 4x150 0x4 4x23 3 0x11
        3 4x21 3 0x4 3 2 0 0 1 4x20 0x7 3 4x54 3 1 2 4x135 3 3 4x120 3 3 4x46 3 3 4x105 3 3 4x19 0x13 1 4x12 0x14 3
        4x110 3 0x5 4x10 0x16 2 3 2 1 0x9 1 2 1 0x11 4x160 3 3 4x200 3 3 4x29 3 3 4x10 3 4x21 3 3 4x130 3 1 0x10 3 4x6
        3 1 0x6 2 4x95 3 3 2 4x240 3 3 4x18 3 3 4x17 3 3 4x11 3 0x12 4x5 3 2 0x3 2 4x58 2 0x7 1 3 4x4 2 1 0x8 1 4x5 2
        0x4 1 4x4 3 0x7 1 2 0x8 1 4x120 3 0 1 4x140""",
    "us-east-2a": """
        4x330 2x7 3 3 4x20 2 2 4x16 2 0x50 1 2x4 3 4x3 2 2 3 4x14 3 3 4x32 3 3 4x12 2 1x4 2x3 1 1 2x3 1 0x29 1x5 0x22
        1 1 4x170 3 3 4x130 3x3 1x9 4x230 3 3 4x21 3 3 4x30 3 4x10 3 3 4x340 3 4x40 3 3 4x66 3 3 4x18 3 3 4x62 3x4 2 2
        4x5 3x3 4 4 1 0x4 2 3 4x150 3 3 4x210 3 3 4x70 1 0x13 1 3 4x15 3x3 2 0x10 1 3 4 3 2x4 3x3 4x20 3x7 4 4 2x4 1x3
        0x4 1x4 0x8 1x12 0 1x3 2 1 0x42 1x5 0x18 1x5 0x400""",
    "us-east-1f": """
        0x14 1 2 1 1 3x3 4x8 3x3 4x3 3 1 1 2 2 4x34 2 1 0x31 1 1 0x20 1 1 0x11 3 3 2 3 4x5 3x4 4x31 2 0x190 1 2 3 3 2 2
        0x14 2x3 1 0 2x3 1 0 1 4 4 3 2 3 4x4 3 2x4 1 0x7 3x3 2 3 4x3 3x3 1 0x4 2x4 1 1 0x5 1 2 0x23 1 2 2 4x13 3 2 0x90
        1 2 3 4x27 3 0x17 4x7 3 3 2x3 3 4x41 3 2 1 0x22 1 3 3 4x58 0x12 1 2 0x5 1 4x55 1 0x23 3 4x17 3 1 4x80 3 0x4 3
        4x6 2x5 3 3 4x3 2x4 4x18 1x6 3 4x19 2 1 0x4 1 0 0 1 2 4x29 3 2 1x5 2 4x190 2 1 1 2 4 2 2 1 1 4x36 3 3 1 0 0 3
        4x9 1 0x4 1 4x55 3 2 1x5 4x12 3 4x66 3 3 1x4 4x20 2x7 1 0 1 1 3 4x35 3 0x29 1 2x3 1 2 4 3x4 4x10 3x9 4x7 3 1 0x8
        1 2 2 0 0 1 2 3 3 4x4 1 0x150""",
}


def _machines(text: str) -> Sequence[int]:
    found: list[int] = []
    for run in text.split():
        count, _, looks = run.partition("x")
        found += [int(count)] * int(looks or 1)
    return tuple(found)


V100_MACHINES: Mapping[str, Sequence[int]] = {zone: _machines(text) for zone, text in _RUNS.items()}

K80_MACHINES: Sequence[int] = _machines("""
    0x34 1 0x7 1 1 0x8 1x5 0x12 1x13 0 0 1 1 0 1x5 0 1x4 0x5 1 0x7 1 1 0x4 1 0x6 1 1 0x12 1 0x13 1x11 0x6 1 1 0x25 1x7
    0x12 1x33 0x10 1x6 0x8 1 1 0x14 1x3 0x7 1x6 0x5 1x92 0x6 1x37 0 1x3 0 1x7 0 1x56 0 1x8 0 1x36 0 1x8 0 1x8 0 1x15 0x4
    1 0 1x4 0 1x12 0 1x58 0x8 1x8 0x8 1x9 0 1x6 0x4 1x3 0 1x17 0x4 1x37 0x3 1x3 0x24 1x60 0x4 1x7 0x10 1 1 0x3 1 0x11 1
    1 0x4 1x16 0x36 1 0x6 1x9 0x15 1 0x4 1x7 0x15 1x3 0x103 1x20 0x10 1x4 0x79 1 0x7 1 0x5 1 1 0x8 1x31 0x5 1x5 0x3 1x13
    0x4 1 1 0x7 1x6 0x3 1x4 0x22 1x15 0x5 1x5 0x3 1 1 0 1x15""")
V100_RARE: Sequence[int] = _machines("""
    0x225 1x3 0x6 1x7 0x245 1x4 0x3 1x13 0x3 1x10 0x3 1x3 0x4 1x3 0x6 1x7 0x185 1x3 0x185 1x4 0x6 1x10 0x3 1x6 0x7 1x3
    0x7 1x3 0x95 1x3 0x3 1x3 0x3 1x4 0x16 1x10 0x6 1x3 0x4 1x10 0x80 1x6 0x3 1x4 0x3 1x3 0x4 1x93 0x6 1x67 0x19 1x3 0x19
    1x13 0x13 1x6 0x170 1x3 0x67 1x3""")

# When the price changed, and to what.
_CHANGES = """
    5:58 .5923 6:00 .6244 6:01 .5923 6:02 .5777 6:11 .5923 6:12 .7 6:17 .743 6:20 .6695 6:24 .7143 6:25 .8 6:42 .9723
    6:45 .8533 6:47 .9077 6:48 .97 6:51 .9723 6:54 .9077 7:00 .97 7:08 .9723 7:19 .9077 7:21 .97 7:25 .98 7:31 1.5901
    7:44 2.6 7:46 26 9:19 .8 9:22 26 9:27 .6974 9:31 .6381 9:33 .7 9:34 .7756 9:41 .8 9:59 .764 10:02 .6993 10:03 .6481
    10:06 .7526 10:07 .6481 10:11 .7 10:22 .6977 10:26 .7 10:27 .6977 10:30 .7 10:36 .8 10:55 .97 10:58 1.4276 11:01 2.6
    11:04 1.4276 11:07 2.6 11:17 26 11:23 2.6 11:25 26 11:52 2.6 11:55 1.4276 11:59 .9996 12:01 .8 12:03 1.0 12:06 .8826
    12:08 1.02 12:11 1.1623 12:14 .8 12:30 .9093 12:35 .98 12:40 1.211 12:45 1.5901"""


def _by_minute(text: str) -> Sequence[float]:
    words = text.split()
    changes = [
        (60 * int(at.partition(":")[0]) + int(at.partition(":")[2]), float(usd))
        for at, usd in zip(words[::2], words[1::2], strict=True)
    ]
    found: list[float] = []
    for (at, usd), (until, _) in pairwise(changes):
        found += [usd] * (until - at)
    return tuple(found)


G2_USD: Sequence[float] = _by_minute(_CHANGES)
