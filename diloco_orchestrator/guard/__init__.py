"""The kill-switch: its rules, their fold over rounds, and the dealing of the held-out set. Pure Python."""

from diloco_orchestrator.guard.fold import FoldResult, fold
from diloco_orchestrator.guard.heldout import CollapseStopError, HeldOutGuard, TripwireStatus, kl_token_trust_filter
from diloco_orchestrator.guard.rule import GuardRule, Sample
from diloco_orchestrator.guard.shares import content_hash, deal, shares_of
from diloco_orchestrator.protocol.verdict import Verdict

__all__ = [
    "CollapseStopError",
    "FoldResult",
    "GuardRule",
    "HeldOutGuard",
    "Sample",
    "TripwireStatus",
    "Verdict",
    "content_hash",
    "deal",
    "fold",
    "kl_token_trust_filter",
    "shares_of",
]
