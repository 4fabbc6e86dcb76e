"""The guard (kill-switch): its rules, their state over rounds, and the split of the held-out set. Pure Python."""

from diloco_orchestrator.guard.fold import FoldResult, fold
from diloco_orchestrator.guard.heldout import CollapseStopError, HeldOutGuard, TripwireStatus, kl_token_trust_filter
from diloco_orchestrator.guard.robust import RoundReports
from diloco_orchestrator.guard.rule import Evidence, GuardRule
from diloco_orchestrator.guard.sequential import SequentialGuard, items_needed
from diloco_orchestrator.guard.shares import content_hash, deal, shares_of
from diloco_orchestrator.protocol.verdict import Verdict, VerdictKind

__all__ = [
    "CollapseStopError",
    "Evidence",
    "FoldResult",
    "GuardRule",
    "HeldOutGuard",
    "RoundReports",
    "SequentialGuard",
    "TripwireStatus",
    "Verdict",
    "VerdictKind",
    "content_hash",
    "deal",
    "fold",
    "items_needed",
    "kl_token_trust_filter",
    "shares_of",
]
