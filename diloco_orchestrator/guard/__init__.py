"""The kill-switch: its rules, their fold over rounds, and the dealing of the held-out set. Pure Python."""

from diloco_orchestrator.guard.evidence import Evidence
from diloco_orchestrator.guard.fold import FoldResult, fold
from diloco_orchestrator.guard.heldout import CollapseStopError, HeldOutGuard, TripwireStatus, kl_token_trust_filter
from diloco_orchestrator.guard.rule import GuardRule, Sample
from diloco_orchestrator.guard.sequential import SequentialGuard
from diloco_orchestrator.guard.set_size import check_set_size, items_needed
from diloco_orchestrator.guard.shares import content_hash, deal, shares_of
from diloco_orchestrator.protocol.verdict import Verdict, VerdictKind

__all__ = [
    "CollapseStopError",
    "Evidence",
    "FoldResult",
    "GuardRule",
    "HeldOutGuard",
    "Sample",
    "SequentialGuard",
    "TripwireStatus",
    "Verdict",
    "VerdictKind",
    "check_set_size",
    "content_hash",
    "deal",
    "fold",
    "items_needed",
    "kl_token_trust_filter",
    "shares_of",
]
