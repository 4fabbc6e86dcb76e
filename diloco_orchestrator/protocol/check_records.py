"""Schemas of what replicas report about each other in a round: payload shards, averages, and strangers' work.

In scatter-reduce each shard of the pseudo-gradient is averaged by its dealers, one owner and one checker, for all
replicas. A replica that published false averages is barred: it deals no shard for the rest of the leg (start or resume
to stop).
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Annotated, ClassVar

from pydantic import Field

from diloco_orchestrator.protocol.digests import BulkDigest, Sha256
from diloco_orchestrator.protocol.record_format import Part, Record


class ReadShards(Part):
    """The payload shards of one contribution that a replica has read, by whether they are as the manifest says."""

    manifest_sha256: Sha256
    good: tuple[Annotated[int, Field(ge=0)], ...] = ()
    bad: tuple[Annotated[int, Field(ge=0)], ...] = ()


class PublishedAverage(Part):
    """The average of one shard of the pseudo-gradient that one or two replicas published in a closed round of the leg.

    In scatter-reduce these replicas, the shard's dealers, average it for all others.
    """

    round: int = Field(ge=1)
    shard: int = Field(ge=0)
    replicas: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1, max_length=2)  # ascending, who published it
    digest: BulkDigest  # in their `Reduced` records


class AverageCheck(Part):
    """One replica's finding whether a published average of a shard is false, made by averaging the payloads itself."""

    average: PublishedAverage
    false: bool  # True is an accusation: they published it, and the payloads give another one


class WorkScore(Part):
    """The effect of one contribution on the held-out items that its scorer was dealt: a change of scores, summed.

    It is between the round's base and that base after a step of a fifth along the contribution alone. Higher is better.
    """

    replica_id: int = Field(ge=0)  # whose contribution it is
    payload: BulkDigest  # `Payload.digest` of its manifest
    count: int = Field(ge=2)  # items
    change: float | None  # sum over items; None: not finite
    squares: float | None = Field(ge=0)  # sum of squared distances from the mean change; None: not finite
    # The same minus the change by a step along the scorer's own contribution; None: not finite, or it has none.
    beside: float | None
    beside_squares: float | None = Field(ge=0)
    # Cosine of the contribution to the author's last one that the scorer has read, and that of the scorer's own to its
    # own last one; None: there is none, or one is zero.
    again: float | None = Field(default=None, ge=-1.0, le=1.0)
    again_own: float | None = Field(default=None, ge=-1.0, le=1.0)
    # Cosine of the contribution to the scorer's own last one, and that of the scorer's own to the last one of another
    # launched replica: how alike two replicas' contributions are. None: likewise.
    like_own: float | None = Field(default=None, ge=-1.0, le=1.0)
    like_other: float | None = Field(default=None, ge=-1.0, le=1.0)


class DealtScore(Part):
    """Trace of dealt data: by how much more a contribution raises scores of items dealt to its author than of others.

    Both numbers are differences of mean changes of scores, by steps along a whole contribution, in standard errors.
    """

    replica_id: int = Field(ge=0)  # whose contribution it is
    payload: BulkDigest  # `Payload.digest` of its manifest
    gap: float
    usual: float  # the same of the scorer's own contribution, on items dealt to the scorer


class Checked(Record):
    """One replica's findings in a round since its last such record.

    By scatter-reduce they are about payload shards of others in this round, and about averages that others published in
    earlier ones; in a run with strangers about the work of these.
    """

    record: ClassVar[str] = "checked"
    later_fields: ClassVar[frozenset[str]] = frozenset({"averages", "scored", "dealt"})
    round: int = Field(ge=1)
    leg: int = Field(ge=1)
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    number: int = Field(ge=1)  # of this replica's records of the round
    claim_sha256: Sha256
    read: tuple[ReadShards, ...]
    averages: tuple[AverageCheck, ...] | None = None  # None: it has none to report
    scored: tuple[WorkScore, ...] | None = None  # contributions of strangers; None: it has none to report
    dealt: tuple[DealtScore, ...] | None = None  # of the same, where the log deals the data; None: none measured


class CheckNamed(Part):
    """Reference from a commit to a replica's findings (`Checked`) on which it relies: key and sha256 of the record."""

    replica_id: int = Field(ge=0, lt=10**9)  # as in keys: what has another key is no record, and nobody need sign it
    number: int = Field(ge=1, lt=10**9)
    sha256: Sha256


MOST_AVERAGES = 64  # that one record is about; a replica has further records


def longest(replicas: int, shards: int) -> int:
    """The most bytes of an honest check record, where each of `replicas` has one payload of `shards` in the round."""
    return 2**15 + replicas * (2**10 + 16 * shards)


def why_too_much(record: Checked, replicas: int, shards: int) -> str:
    """Reason why a check record says more than an honest one can; empty if it does not. Arguments as of `longest`.

    Readers keep it for the round, where the longest record that could be written takes 430 MB.
    """
    indices = [(*each.good, *each.bad) for each in record.read]
    if any(len(each) > shards or max(each, default=0) >= shards for each in indices):
        return f"it is about more than the {shards} shards that a payload has"
    if max(len(record.read), len(record.scored or ()), len(record.dealt or ())) > replicas:
        return f"it is about more contributions than {replicas} replicas make"
    if len(record.averages or ()) > MOST_AVERAGES:
        return f"it is about more than {MOST_AVERAGES} averages"
    return ""


def barred_after(barred: Collection[int], roster: Collection[int], checks: Iterable[Checked]) -> tuple[int, ...]:
    """Replicas that may average no shard for others for the rest of a leg (start or resume to stop), in id order.

    Those in `barred`, who may not before this round; those whom more than half of the other replicas in `roster` accuse
    of one false average; and those who accuse others of one that more than half report as right. So a minority excludes
    nobody but itself. `checks`: the findings that the round's commit names.
    """
    voters, found = set(roster) - set(barred), set(barred)
    said: dict[PublishedAverage, dict[bool, set[int]]] = defaultdict(lambda: {True: set(), False: set()})
    for checked in checks:
        for each in checked.averages or ():
            said[each.average][each.false] |= {checked.replica_id} & voters
    for average, by in said.items():
        if 2 * len(by[True]) > len(voters):
            found |= set(average.replicas)
        if 2 * len(by[False]) > len(voters):
            found |= by[True]
    return tuple(sorted(found))
