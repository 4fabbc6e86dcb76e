"""Parses a listing of a run's folder: offers, which are attempts for machines that join, and the records about each."""

from collections.abc import Iterable, Mapping

from diloco_orchestrator.executors.contract import LaunchRequest
from diloco_orchestrator.executors.remote_base import attempt_name
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Offer
from diloco_orchestrator.store.base import ObjectInfo


def by_attempt(listing: Iterable[ObjectInfo]) -> dict[str, set[keys.JoinKey]]:
    """Parsed keys of offers (attempts for machines that join) and of the records about them, by attempt name."""
    found: dict[str, set[keys.JoinKey]] = {}
    for info in listing:
        if (parsed := keys.parse_join_record(info.key)) is not None:
            found.setdefault(parsed.name, set()).add(parsed)
    return found


def offers_in(listing: Iterable[ObjectInfo]) -> dict[str, set[keys.JoinKey]]:
    """Parsed keys of offers (attempts for machines that join) and of their records, by name of the offered attempt."""
    found = by_attempt(listing)
    return {name: records for name, records in found.items() if any(each.record == keys.JOIN_OFFER for each in records)}


def records_about(listed: Mapping[str, Iterable[keys.JoinKey]], name: str, offer_sha256: str) -> set[str]:
    """Names of an attempt's offer to joining machines, if any, and of the records about the offer with this digest."""
    records = listed.get(name, ())
    return {each.record for each in records if each.record == keys.JOIN_OFFER or each.is_about(offer_sha256)}


def name_of(offer: Offer) -> str:
    """The name of an attempt offered to joining machines, as part of the keys of the records about it."""
    return attempt_name(LaunchRequest(offer.run_id, offer.replica_id, offer.attempt, []))


def who(offer: Offer) -> str:
    """The offered attempt as text for people: run, replica and attempt number."""
    return f"replica {offer.replica_id}, attempt {offer.attempt}"
