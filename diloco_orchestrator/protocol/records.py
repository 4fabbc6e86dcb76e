"""Schemas of the JSON records of a run as a whole, its legs, rounds and snapshots: one class each.

`protocol.keys` has the keys of the objects, `protocol.record_format` their byte format. Wall-clock times (`at`) are for
people; the protocol never compares them.
"""

import math
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field, JsonValue

from diloco_orchestrator.config import RunConfig
from diloco_orchestrator.protocol.check_records import CheckNamed
from diloco_orchestrator.protocol.digests import BulkDigest, Sha256, bulk_digest
from diloco_orchestrator.protocol.record_format import LONGEST_REASON, MOST_COUNTED, AsText, Part, Record
from diloco_orchestrator.protocol.signatures import SignedBy
from diloco_orchestrator.protocol.verdict import Verdict, VerdictKind

# -- the run and its legs ---------------------------------------------------------------------------------------------


# Names are those of image references (github.com/distribution/reference) without a digest, of ASCII letters only, so
# that none can hold a control character or a space.
NAME_FORM = r"[A-Za-z0-9\[][A-Za-z0-9._:/\[\]-]{0,399}"
DIGEST_FORM = r"sha256:[0-9a-f]{64}"
MOST_IMAGES = 64

ImageName: TypeAlias = Annotated[str, Field(pattern=rf"^{NAME_FORM}$")]
ImageDigest: TypeAlias = Annotated[str, Field(pattern=rf"^{DIGEST_FORM}$")]
ImageDigests: TypeAlias = Annotated[dict[ImageName, ImageDigest], Field(max_length=MOST_IMAGES)]


class Run(Record):
    """run.json: the frozen configuration of a run. It holds no model parameters, because the launcher has no model."""

    record: ClassVar[str] = "run"
    later_fields: ClassVar[frozenset[str]] = frozenset({"signed_by", "signed_rules"})
    run_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")  # also the name of a folder of curves
    config: RunConfig
    package_version: str
    code_sha256: Sha256 | None = None  # of the archive that replicas on other machines fetch
    executor: dict[str, JsonValue] | None = None  # name and options to make it again; None if a user's own class
    secret_names: tuple[str, ...] = ()  # environment variables that a launcher passes on; no record holds their values
    images: ImageDigests = Field(default_factory=dict)  # of the lock: executors send these names by these digests
    source: str = ""  # git commit of the launched code, "+changes" after it; empty: in no repository. For people only
    signed_by: SignedBy | None = None  # public keys; None: the run is not signed
    # By which version of the rules of signed runs void commits are read. 2: nobody who holds the key of one replica can
    # write commits that stop readers (docs/inside/signed-runs.md). None: the first.
    signed_rules: Literal[2] | None = None


_LONGEST_NAME = 255  # bytes, of the common file systems


def _check_name(name: str) -> str:
    if name in ("", ".", "..") or set(name) & set("/\\\0") or len(name.encode()) > _LONGEST_NAME:
        raise ValueError(f"{name[:_LONGEST_NAME]!r} is no file name")
    return name


FileName: TypeAlias = Annotated[str, AfterValidator(_check_name)]  # str in code; records check its form


class FileInfo(Part):
    """Digest and size of one file of a snapshot."""

    digest: BulkDigest
    size: int


class Probe(Record):
    """probe.json of earlier versions: names the reference from which `KLProbe` measured drift since the run's start."""

    record: ClassVar[str] = "probe"
    base_digest: BulkDigest  # of the run's first base, whose predictions the reference holds
    items: Sha256  # over the content hashes of the probe's items, in their order
    digest: BulkDigest  # of probe.safetensors
    size: int = Field(ge=0)  # bytes
    tokens: int = Field(ge=1)  # that are averaged


class Begin(Record):
    """legs/<leg>/begin.json: begins a leg (start or resume to stop): its base and its number of outer steps."""

    record: ClassVar[str] = "begin"
    leg: int = Field(ge=1)
    after_round: int = Field(ge=0)  # the last commit before the leg
    from_round: int = Field(ge=0)  # the leg starts from the base after this round, which has a snapshot
    from_outer_step: int = Field(ge=0)  # outer steps in that base
    # The digest of that base, as whoever began the leg derived it. None: leg 1 begins before there is a model.
    base_digest: BulkDigest | None = None
    outer_steps: int = Field(ge=1)  # that this leg takes
    guard: dict[str, JsonValue] | None = None  # the guard's state that the leg starts with; None: a new baseline
    override_guard: str = ""  # why a user dropped the guard's state; empty if none did
    settings: dict[str, JsonValue] = Field(default_factory=dict)  # of this leg, where it differs from run.json
    by: str
    why: str
    previous: Sha256  # of the last commit before the leg; of run.json for leg 1


class Halt(Record):
    """legs/<leg>/halt.json: a request to stop the leg (the run since its start or last resume) after the open round."""

    record: ClassVar[str] = "halt"
    later_fields: ClassVar[frozenset[str]] = frozenset({"new_keys"})
    leg: int = Field(ge=1)
    by: str
    reason: str
    new_keys: bool | None = None  # whether the next leg, which then begins by itself, has new keys, in a signed run


class Scale(Record):
    """legs/<leg>/scale/<number>.json: a request to train with so many replicas; of several the highest number counts.

    Numbers count from 1 in each leg (start or resume to stop).
    """

    record: ClassVar[str] = "scale"
    leg: int = Field(ge=1)
    number: int = Field(ge=1)
    replicas: int = Field(ge=1)
    by: str


class Out(Record):
    """legs/<leg>/out/<replica>.json: the replica is launched no more until a resume, so no round waits for it."""

    record: ClassVar[str] = "out"
    leg: int = Field(ge=1)
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=0)  # its last one
    by: str
    reason: str


class Result(Record):
    """legs/<leg>/result.json: how a leg, the rounds from a start or resume to a stop, ended."""

    record: ClassVar[str] = "result"
    leg: int = Field(ge=1)
    status: Literal["completed", "halted", "failed"]
    round: int = Field(ge=0)  # the last commit
    outer_steps: int = Field(ge=0)  # of the whole run
    reason: str
    verdict: Verdict | None = None  # set when the guard fired
    commit_sha256: Sha256 = ""  # of the last commit, which no later one names; empty if no replica brought a model

    @property
    def before_any_commit(self) -> bool:
        """Whether a coordinator wrote this result of a run that it stopped before any replica made the first base."""
        return not self.round and not self.commit_sha256 and self.status != "completed"


# -- contributions ----------------------------------------------------------------------------------------------------


_MOST = 1e60  # beyond any norm of fp32 numbers; its square is finite


class Shard(Part):
    """Digest and size of one object: a payload shard or a saved state."""

    digest: BulkDigest
    size: int = Field(le=MOST_COUNTED)  # bytes


class Payload(Part):
    """A published pseudo-gradient: a fragment's parameters in name order as a flat vector, in encoded shards."""

    codec: str
    numel: int
    shard_numel: int  # elements per shard; the last one may be shorter
    shards: tuple[Shard, ...]
    # The Euclidean norm of each shard's decoded elements, in four digits; whoever verifies the bytes checks it.
    norms: tuple[Annotated[float, Field(ge=0, le=_MOST)], ...] = ()

    @property
    def norm(self) -> float:
        """The Euclidean norm of the whole vector, from the norms of its shards; the same bits on every machine."""
        return math.sqrt(math.fsum(norm * norm for norm in self.norms))

    @property
    def digest(self) -> BulkDigest:
        """The digest over the digests of all shards: equal for payloads with equal bytes and equal shards."""
        return bulk_digest("".join(shard.digest for shard in self.shards).encode())


class Disagreeing(Part):
    """A contribution that `aggregate="agreeing_mean"` left out of the average of `round` in some shards."""

    replica_id: int = Field(ge=0)
    round: int = Field(ge=1)
    shards: int = Field(ge=1)  # in which it was left out
    # Its median cosine to the others, in the shard where that is lowest, and the median of all contributions there.
    agreement: float = Field(ge=-1, le=1)
    usual: float = Field(ge=-1, le=1)

    @property
    def reason(self) -> str:
        return (
            f"its direction agrees with most others' by {self.agreement:.2f}, where {self.usual:.2f} is the median, in "
            f"{self.shards} shard{'' if self.shards == 1 else 's'}"
        )


class Score(Part):
    """The held-out score of a base (global model) on one share of the held-out set. Higher is better."""

    share: int = Field(ge=0)
    sum: float | None  # over items; None: not finite
    count: int = Field(ge=1)

    @property
    def mean(self) -> float:
        """Mean score per item; NaN if the score of an item is not finite."""
        return math.nan if self.sum is None else self.sum / self.count


class VaultScore(Part):
    """Change of the scores, from an earlier base to the scored one, on one share of the confirmation set.

    That set has held-out items that are scored only to confirm a halt. Higher is better.
    """

    share: int = Field(ge=0)
    change: float | None  # sum over items of their score minus that on the earlier base; None: not finite
    squares: float | None  # sum of the squares of these differences from their mean; None: not finite
    count: int = Field(ge=2)

    @property
    def mean(self) -> float:
        """Mean change per item; NaN if the score of an item is not finite."""
        return math.nan if self.change is None else self.change / self.count

    @property
    def variance(self) -> float:
        """Variance of the change over items; NaN if the score of an item is not finite."""
        return math.nan if self.squares is None else max(self.squares, 0.0) / (self.count - 1)


class Metric(Part):
    """Sum and count of observed values of a metric, so that means of several replicas can be merged."""

    sum: float | None  # None: not finite
    count: int = Field(ge=0)

    @property
    def mean(self) -> float:
        """The mean of the values; NaN if one is not finite or if there are none."""
        return math.nan if self.sum is None or not self.count else self.sum / self.count

    @classmethod
    def merged(cls, metrics: "Iterable[Metric | None]") -> "Metric | None":
        """Sum and count over all `metrics`; None if all are None. The sum is None if one of the sums is."""
        present = [metric for metric in metrics if metric is not None and metric.count]
        finite = [metric.sum for metric in present if metric.sum is not None]
        total = sum(finite) if len(finite) == len(present) else None
        return cls(sum=total, count=sum(metric.count for metric in present)) if present else None


class Origin(Part):
    """The inner steps of one `round` whose work a contribution contains: its own, or earlier ones that came late."""

    round: int = Field(ge=1)
    steps: int = Field(ge=0, le=MOST_COUNTED)


class Residual(Part):
    """The residual of a contribution: what its lossy codec lost, which the author adds to its next contribution."""

    share: float = Field(ge=0)  # its norm over the norm of what was encoded, in three digits
    saved: Payload | None = None  # it, in fp32, under `keys.residual`; None: its author saved no state
    missing: tuple[tuple[int, float], ...] = ()  # round and share of residuals that the payload lacks


class Consumed(Part):
    """Count and digest of the training items of a contribution's own steps, each compared with the held-out set."""

    items: int = Field(ge=0)
    digest: Sha256  # over the items' hashes, in the order in which they were consumed


class Progress(Part):
    """The state of a replica's data iteration and random generators, so that a restarted attempt repeats no batch."""

    cursor: dict[str, JsonValue]  # position in the data
    rng: dict[str, JsonValue]  # states of the random generators
    inner_steps: int = Field(ge=0)  # of this replica, over the whole run
    tokens: int = Field(ge=0)
    stateful: str = ""  # small stateful objects and learning rates, as `replica.training.small_state` encodes them


class Contribution(Record):
    """The manifest of a replica's response to a round. It is written after the objects that it names, so they exist."""

    record: ClassVar[str] = "contribution"
    later_fields: ClassVar[frozenset[str]] = frozenset({"residual", "ranks"})
    round: int = Field(ge=1)
    leg: int = Field(ge=1)
    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=1)
    claim_sha256: Sha256 | Literal[""] = ""  # of that attempt's claim; a manifest without it does not count
    kind: Literal["delta", "abstention", "scores"]  # pseudo-gradient; nothing to average; final evaluation's scores
    reason: str = ""  # of an abstention
    # The claim: of the base that its training started from, hashed when it was published. Empty in an announcement.
    base_digest: BulkDigest | Literal[""]
    snapshot_round: int = Field(ge=0)  # the snapshot that this base was rebuilt from
    rebuilt_after: int = Field(ge=0)  # the commit up to which this base was last rebuilt from the bucket
    fragment: int = Field(default=0, ge=0)
    payload: Payload | None = None
    state: Shard | None = None  # the author's optimizer and schedules after this contribution, if it saved them
    buffers: Shard | None = None  # the author's buffers that differ from the first snapshot's; None: none does
    tokens: int = Field(default=0, ge=0, le=MOST_COUNTED)  # of its own steps of this round; a weight may follow from it
    origins: tuple[Origin, ...] = ()  # its own work and what it carries
    dropped: tuple[Origin, ...] = ()  # earlier work of the author that will never be averaged
    residual: Residual | None = None  # None for a codec without error feedback
    in_loop: Metric | None = None  # in the round's first steps, near the base that `scores` are of; higher is better
    scores: tuple[Score, ...] = ()  # of the base that the round started from; higher is better
    local_scores: tuple[Score, ...] = ()  # of the author's local parameters, on the same shares; per-replica guard only
    vault: tuple[VaultScore, ...] = ()  # of the base, after an alarm; empty in all other rounds
    metrics: dict[str, Metric] = Field(default_factory=dict)
    disagreeing: tuple[Disagreeing, ...] = ()  # in the round before, as its author averaged it; every honest one alike
    consumed: Consumed | None = None  # items of its steps, compared with the held-out set; None: not compared
    progress: Progress | None = None
    train_s: float = Field(default=0.0, ge=0)  # from the round's opening to this manifest, on the author's clock
    ranks: int | None = Field(default=None, ge=2)  # processes of the author, for readers; None: one

    @property
    def own_steps(self) -> int:
        """Inner steps of this round whose work the payload contains, without those of earlier rounds."""
        return sum(origin.steps for origin in self.origins if origin.round == self.round)


# -- commits ----------------------------------------------------------------------------------------------------------


class Answer(Part):
    """One replica's response to a round as its commit lists it: kind, weight, and the manifest by digest."""

    replica_id: int = Field(ge=0)
    attempt: int = Field(ge=0)  # 0 where the manifest cannot be read, or is not by the attempt that it names
    kind: Literal["delta", "abstention", "scores", "wrong_base", "unverifiable"]
    averaged: bool
    weight: int = Field(ge=0)  # `weights.shares_of` of the fields below; a commit in which it differs is void
    norm: float = Field(default=0.0, ge=0)  # of the payload, as the manifest declares it
    payload: BulkDigest | Literal[""] = ""  # `Payload.digest` of the manifest; empty without a payload
    tokens: int = Field(default=0, ge=0)  # as the manifest says
    origins: tuple[Origin, ...] = ()  # as the manifest says
    train_s: float = Field(default=0.0, ge=0)  # as the manifest says; 0 where that cannot be read
    manifest_sha256: Sha256
    reason: str = Field(default="", max_length=LONGEST_REASON)  # why it is no contribution, in its judge's words


class Quarantine(Part):
    """A contribution that a commit leaves out of the average, by its author's local scores or as harmful (stranger)."""

    replica_id: int = Field(ge=0)
    reason: str


class Clipped(Part):
    """A contribution whose weight was reduced: its norm is too large, it is all zeros, or equals another one."""

    replica_id: int = Field(ge=0)
    reason: str


class UsualNorms(Part):
    """Statistics of contribution norms since a start or resume, which fix the norm limit (`weights.limit_of`)."""

    rounds: int = Field(ge=0)  # that averaged two contributions or more
    spread: float = Field(ge=0)  # how far the norms of a round are apart: mean over recent rounds
    levels: tuple[tuple[int, float], ...]  # each fragment's number, and its median norm, mean over its recent rounds


class Discounted(Clipped):
    """A contribution whose scores or metric are clipped or ignored by the guard; its payload is averaged."""


class RoundMetrics(Part):
    """Metrics of a round (loss, tokens, bytes) in its commit, for display only; `round_metrics_of` computes them."""

    loss: float | None = None  # mean of what was passed to `observe(loss=...)`, over all responses
    reward: float | None = None
    # Metrics that a replica observed as NaN or infinite in this round, by name, and which replicas did.
    not_finite: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    in_loop: float | None = None  # mean over replicas of their manifests' `in_loop`, the finite ones; higher is better
    tokens: int = Field(default=0, ge=0)  # of the contributors
    dropped_steps: int = Field(default=0, ge=0)  # inner steps of earlier rounds that responses list as dropped
    payload_bytes: int = Field(default=0, ge=0)  # written by all replicas together, averaged or not
    disagreeing: tuple[Disagreeing, ...] = ()  # left out of the round before by its aggregate, as most manifests say
    extra: dict[str, float] = Field(default_factory=dict)  # `protocol.round_metrics`: means over replicas


class Commit(Record):
    """The record that ends a round for all replicas. `previous`, the sha256 of the commit before, makes a hash chain.

    A commit fixes the inputs of the round's outer step: which manifests are averaged, with which weights. It is created
    before any averaging; then every replica computes the step itself.
    """

    record: ClassVar[str] = "commit"
    later_fields: ClassVar[frozenset[str]] = frozenset({"checks", "barred", "average_codec"})
    round: int = Field(ge=1)
    leg: int = Field(ge=1)
    fragment: int = Field(ge=0)
    outer_step: int = Field(ge=0)  # outer steps in the base after the round
    answers: tuple[Answer, ...]  # in replica_id order
    begin_sha256: Sha256
    base_digest: BulkDigest | None  # of the base before, as the averaged manifests or most claim it; None: no claims
    roster: tuple[int, ...]  # replicas that the next round waits for
    guard: dict[str, JsonValue] | None = None  # the guard's state after the round
    verdict: Verdict | None = None  # None as long as nothing was scored
    quarantined: tuple[Quarantine, ...] = ()  # left out by held-out scores, in replica_id order
    norms: UsualNorms | None = None  # of the rounds before this one; follows from the commit before
    clipped: tuple[Clipped, ...] = ()  # averaged with less weight, in replica_id order; follows from the answers
    discounted: tuple[Discounted, ...] = ()  # for their scores, in replica_id order; follows from the manifests
    checks: tuple[CheckNamed, ...] | None = None  # who read or scored what; None in a gather without strangers
    barred: tuple[int, ...] | None = None  # replicas that are no dealers any more; None for none; follows from checks
    average_codec: str | None = None  # that the average passes through before the step; None: it is fp32 as summed
    figures: RoundMetrics | None = None  # for readers of the log; None in a coordinator's commit
    applied: bool  # whether the average of this round was applied as an outer step
    empty_rounds: int = Field(ge=0)  # rounds in a row that averaged no contribution
    stop: Literal["none", "completed", "halted", "failed"]
    by: AsText
    reason: str
    previous: Sha256

    @property
    def fired(self) -> bool:
        """Whether the guard's verdict stops the run."""
        return self.verdict is not None and self.verdict.fire

    @property
    def halted_by_guard(self) -> bool:
        """Whether the guard stopped the run because of the model's scores, not because it had too few to judge."""
        return self.verdict is not None and self.verdict.fire and self.verdict.kind is VerdictKind.HALT

    def decided_about(self) -> set[int]:
        """Replicas whose contribution this commit averages or quarantines: none adds its work to a later one."""
        return {each.replica_id for each in self.quarantined} | {a.replica_id for a in self.answers if a.averaged}

    def quarantines(self, replica_id: int) -> str:
        """Reason why this replica's contribution is left out by held-out scores; empty if it is not."""
        return next((each.reason for each in self.quarantined if each.replica_id == replica_id), "")

    @property
    def by_coordinator(self) -> bool:
        """Whether a coordinator wrote this commit, as it does only to stop a run whose replicas cannot commit."""
        return self.by.is_coordinator


class ReuploadRequest(Record):
    """A request to upload a committed payload shard again, as version `take`, because a replica cannot read it."""

    record: ClassVar[str] = "want"
    round: int = Field(ge=1)
    replica_id: int = Field(ge=0)  # whose payload it is
    attempt: int = Field(ge=1)
    shard: int = Field(ge=0)
    take: int = Field(ge=2)
    by: AsText
    reason: str


class Unfounded(Record):
    """A coordinator's finding that a round's commit names manifests or check records that are not there, or others.

    In a signed run the commit is void then. Before, the coordinator puts an abstention where each is missing, so that
    nobody can bring it later.
    """

    record: ClassVar[str] = "unfounded"
    round: int = Field(ge=1)
    commit_sha256: Sha256
    by: str
    reason: str


# -- snapshots --------------------------------------------------------------------------------------------------------


class Snapshot(Record):
    """snapshot.json: the files of a snapshot. It is written last, so a snapshot that has it is complete.

    Readers load a snapshot only once commits after its round claim a base with its digest.
    """

    record: ClassVar[str] = "snapshot"
    round: int = Field(ge=0)
    base_digest: BulkDigest  # as its writer claims
    by: int | None = Field(ge=0)  # the replica that wrote it; None: a process that is no replica
    files: dict[FileName, FileInfo]


class Retention(Record):
    """retention.json: `diloco gc` deleted payloads of a run whose settings keep them all, so gaps are no fault."""

    record: ClassVar[str] = "retention"
    payloads: Literal["needed"]
    by: str
