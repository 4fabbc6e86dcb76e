"""The kill-switch: the rule, its fold over rounds, and the dealing of the held-out set. Pure Python."""

from diloco_orchestrator.guard.fold import FoldResult, GuardSettings, InLoop, ShareScore, Verdict, fold
from diloco_orchestrator.guard.heldout import CollapseStopError, HeldOutGuard, TripwireStatus, kl_token_trust_filter
from diloco_orchestrator.guard.shares import content_hash, deal, shares_of

__all__ = [
    "CollapseStopError",
    "FoldResult",
    "GuardSettings",
    "HeldOutGuard",
    "InLoop",
    "ShareScore",
    "TripwireStatus",
    "Verdict",
    "content_hash",
    "deal",
    "fold",
    "kl_token_trust_filter",
    "shares_of",
]
