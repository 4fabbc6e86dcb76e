"""`whatif`: the base of a run if a round had been decided differently, computed from stored payloads alone."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from diloco_orchestrator.config import OuterConfig, OuterSettings
from diloco_orchestrator.inspection.pull import check_new, write_folder
from diloco_orchestrator.inspection.verify.loading import NO_CODE, OwnCode
from diloco_orchestrator.inspection.whatif.decision import other_decision
from diloco_orchestrator.inspection.whatif.models import BaseScorer, ModelWriter, logged_mean
from diloco_orchestrator.inspection.whatif.replay import check_contributed, distance, line_from, replay
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.open_store import INTERACTIVE, absolute_url, open_store

__all__ = ["WhatIf", "whatif", "whatif_of"]

_RECORD = "whatif.json"  # in the folder that `save` makes


@dataclass(frozen=True)
class WhatIf:
    """The base that another decision would give, beside the real base. Scores have the metric's own sign."""

    url: str
    decision: str  # what was decided otherwise
    rounds: list[int]  # in which rounds it was
    after: int  # the round that both bases are after
    digest: str
    digest_as_it_was: str
    difference: float  # L2 norm of the difference of the parameters
    moved: float  # L2 norm of what the base moved by since the first of these rounds, as it was
    heldout: float | None  # mean over the held-out items; None: not scored
    heldout_as_it_was: float | None  # scored here, as the other one
    logged: float | None  # what the replicas logged of the base as it was; None if they did not score every item
    items: int | None  # held-out items that were scored here
    below_quorum: list[int]  # rounds that average fewer than their quorum, so that no run would have committed so
    nobody: list[int]  # rounds left without a contribution to average, so that the base stays
    saved: str | None  # folder of the model under the other decision

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """The hypothetical base and the real one, compared in a few lines of text."""
        first, last = self.rounds[0], self.rounds[-1]
        where = f"round {first}" if first == last else f"rounds {first} to {last}"
        share = f", {self.difference / self.moved:.2%} of what the base moved by" if self.moved else ""
        said = [
            f"decided     {where}: {self.decision}",
            f"base        {self.digest}  after round {self.after}",
            f"as it was   {self.digest_as_it_was}",
            f"difference  {self.difference:.6g} (L2 norm{share})",
        ]
        if self.heldout is not None and self.heldout_as_it_was is not None:
            change = self.heldout - self.heldout_as_it_was
            said.append(f"held-out    {self.heldout:.6g}, as it was {self.heldout_as_it_was:.6g} ({change:+.3g})")
        if self.logged is not None:
            said.append(f"logged      {self.logged:.6g}, by the replicas, of the base as it was")
        if self.below_quorum:
            said.append(f"note        fewer than the quorum in {_listed(self.below_quorum)}: no run would commit that")
        if self.nobody:
            said.append(f"note        nobody is left to average in {_listed(self.nobody)}: the base stays")
        return [*said, f"saved       {self.saved}"] if self.saved else said


def _listed(rounds: Sequence[int]) -> str:
    return f"{'round' if len(rounds) == 1 else 'rounds'} {', '.join(map(str, rounds))}"


def whatif(
    url: str,
    *,
    round: int,
    without: Collection[int] = (),
    outer: OuterConfig | OuterSettings | None = None,
    weights: str | None = None,
    aggregate: str | None = None,
    clip: str | None = None,
    clip_factor: float | None = None,
    onward: bool = False,
    until: int | None = None,
    score: Callable[[Any, Sequence[Any]], Any] | None = None,
    build: Callable[[], Any] | None = None,
    heldout_items: Sequence[Any] | None = None,
    save: str | Path | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> WhatIf:
    """The base of the run in `url` if `round` had been decided otherwise, beside the base as it was. Only reads there.

    The contributions are the stored ones. After `round` itself the base has the bits of a run that decided so. After
    later rounds it has not, because replicas would have trained from the other base: it is the same contributions,
    averaged otherwise.

    Args:
        without: replicas whose contributions are left out.
        outer: settings of the outer optimizer, such as {"lr": 0.4}; momentum can be switched neither on nor off.
        weights: "uniform" or "tokens".
        aggregate: "mean", "agreeing_mean", "trimmed_mean" or "median".
        clip, clip_factor: how a contribution with a large norm is clipped; "off": not at all.
        onward: decide so in every round from `round` to `until`, not in `round` alone.
        until: the round after which bases are compared; default: `round`, with `onward` the newest base's.
        score, build, heldout_items: as in `verify`; with `score` both bases are scored on the held-out set.
        save: a new folder for the model under the other decision, in the layout of snapshots.
        storage_options: credentials and endpoint in s3fs spelling.

    Raises `ConfigError` for a decision, a round or a replica that the run does not have, for payloads that retention
    deleted, and for a scorer that does not fit; `NoSuchRun`; `PayloadCorrupt` or `RecordInvalid` for an object that was
    changed, and `StoreError`.
    """
    store = open_store(absolute_url(url), storage_options, retry=INTERACTIVE, must_exist=True)
    given = outer.model_dump() if isinstance(outer, OuterConfig) else dict(outer or {})
    return whatif_of(
        RunLog(store),
        round,
        {
            "without": without,
            "outer": given,
            "weights": weights,
            "aggregate": aggregate,
            "clip": clip,
            "clip_factor": clip_factor,
        },
        OwnCode(build, score, heldout_items),
        onward=onward,
        until=until,
        save=None if save is None else Path(save),
    )


def whatif_of(
    run_log: RunLog,
    round_: int,
    decided: Mapping[str, Any],
    code: OwnCode = NO_CODE,
    *,
    onward: bool = False,
    until: int | None = None,
    save: Path | None = None,
) -> WhatIf:
    """The result of `whatif` for an open run log. `decided`: arguments of `decision.other_decision`."""
    decision = other_decision(run_log.run.config, **decided)
    if save is not None:
        check_new(save)
    line = line_from(run_log, round_, round_ if until is None and not onward else until)
    changed = [commit.round for commit in line.commits] if onward else [round_]
    check_contributed(line, decision, changed, run_log.store.url)
    writer = ModelWriter(run_log) if code.score is not None or save is not None else None
    scorer = BaseScorer(run_log, writer, code) if writer is not None and code.score is not None else None
    done = replay(run_log, line, decision, changed)
    digest_as_it_was = done.as_it_was.digest()
    usual = [answer for answer in line.last.answers if answer.averaged]
    result = WhatIf(
        url=run_log.store.url,
        decision=decision.words(),
        rounds=changed,
        after=line.last.round,
        digest=done.other.digest(),
        digest_as_it_was=digest_as_it_was,
        difference=distance(done.other, done.as_it_was),
        moved=done.moved,
        heldout=scorer.mean(done.other, done.averaged_in, done.averaged) if scorer else None,
        heldout_as_it_was=scorer.mean(done.as_it_was, line.last.round, usual) if scorer else None,
        logged=logged_mean(run_log, line.last.round, digest_as_it_was),
        items=scorer.items if scorer else None,
        below_quorum=list(done.below_quorum),
        nobody=list(done.nobody),
        saved=None if save is None else str(save),
    )
    if save is not None and writer is not None:
        record = json.dumps(result.to_json(), indent=2, sort_keys=True).encode()
        write_folder(save, chain(writer.files(done.other, done.averaged_in, done.averaged), [(_RECORD, [record])]))
    return result
