"""Witness of a run: signs statements of the newest commit of its log and keeps them outside the run's bucket.

`diloco verify` compares them with the log later. Who launched a run holds its keys and may write its bucket, so no
object in that bucket shows that its log was cut, forked or rewritten; a statement by another person does.
"""

import datetime
from dataclasses import dataclass

from diloco_orchestrator.errors import ConfigError, RecordInvalid
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys, pace
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.head import Head, Noted
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.signatures import Signature, split_signed, to_text
from diloco_orchestrator.protocol.witnessed import HEADS, Witnessed, witnessed_bytes
from diloco_orchestrator.run_log.reader import read_optional
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import Identity, is_by
from diloco_orchestrator.store.base import Store


@dataclass(frozen=True)
class Sight:
    """The result of one reading of a run by a witness."""

    stated: Witnessed | None  # the new statement; None if the head is that of the last one
    contradiction: str = ""  # between the log and the statements before
    is_over: bool = False  # whether the run has ended


class Witness:
    """States the heads (newest commits) of the log of the run in `store`, signed by `identity`.

    `place`: the folder or bucket of the statements, for this run alone. Raises `ConfigError` if it has statements about
    another run, or by another witness.
    """

    def __init__(self, store: Store, place: Store, identity: Identity, stamp: Stamp) -> None:
        self._store, self._place, self._identity, self._stamp = store, place, identity, stamp
        self._log: RunLog | None = None
        stated = statements(place)
        self._last = stated[-1] if stated else None
        # The last one alone, once the log has been found to hold all of them: each commit names the one before.
        self._compared = stated
        if self._last is not None and self._last.witness != identity.public.key:
            raise ConfigError(
                f"{place.url} has statements of {self._last.witness}; this user is {identity.public.key}. Give each "
                "witness a folder of its own."
            )

    @property
    def apart_s(self) -> float:
        """The least pause in seconds between two polls that the store's limit of requests leaves; 0 without a limit."""
        return pace.apart_s(self._log.run.config, self._store.requests_allowed) if self._log is not None else 0.0

    def look(self) -> Sight:
        """Read the log's end, compare it with the last statement, and write a statement about a new last commit.

        The first call compares the log with every statement. A commit that contradicts one is stated too, so that the
        place holds both heads, each signed. Raises the store's errors, `NoSuchRun`, and `RecordInvalid` for a log that
        cannot be read.
        """
        last = self._last
        why = next(filter(None, map(self._why_not_there, reversed(self._compared))), "")
        if self._log is None or why:  # a kept one remembers what it has read
            self._log = RunLog(self._store)
        log = self._log
        is_over = RunReader(self._store, log).has_stopped()  # before reading, so that no commit is left out
        newest = log.newest(log.newest_begin().record)
        if not why:
            self._compared = self._compared[-1:]
        if newest is None or (last is not None and last.head == Head(newest.commit.round, newest.sha256)):
            return Sight(None, why, is_over)
        stated = Witnessed(
            **self._stamp(),
            url=log.store.url,
            run_sha256=log.run_sha256,
            round=newest.commit.round,
            commit_sha256=newest.sha256,
            witness=self._identity.public.key,
        )
        body = stated.to_bytes()
        signature = to_text(self._identity.signing.sign(witnessed_bytes(body)))
        self._place.create(stated.key, body + Signature(certificate=None, signature=signature).line())
        if not why:
            self._last, self._compared = stated, [stated]
        return Sight(stated, why, is_over)

    def _why_not_there(self, last: Witnessed) -> str:
        """Reason why the log contradicts an earlier statement about it; empty if the stated commit is in the log."""
        for key, sha256, what in (
            (keys.RUN, last.run_sha256, f"the run of round {last.round}"),
            (keys.commit(last.round), last.commit_sha256, f"the head {last.head.short}"),
        ):
            data = read_optional(self._store, key)
            if data is None or sha256_hex(data) != sha256:
                found = "is gone" if data is None else "is another one"
                return f"{key} {found}, which was {what}, seen {_time_of(last)}"
        return ""


def statements(place: Store) -> list[Witnessed]:
    """All statements in a witness's place, by round. Raises `ConfigError` for one that its witness has not signed."""
    found = []
    for info in place.list(HEADS):
        split = split_signed(place.get(info.key))
        body, signature = split if split is not None else (b"", None)
        try:
            stated = Witnessed.from_bytes(body, info.key)
            good = signature is not None and is_by(stated.witness, signature.signature, witnessed_bytes(body))
            if not good or stated.key != info.key:
                raise RecordInvalid("its signature is not by the witness that it names")
        except RecordInvalid as error:
            raise ConfigError(
                f"{place.url}/{info.key} is no statement of a witness ({error}): somebody has changed it. Use the "
                "witness's own copy."
            ) from None
        found.append(stated)
    return found


def heads_seen(place: Store, witness: str | None) -> list[Noted]:
    """The heads (newest commits) that a witness has stated in `place`. `witness`: its public key; None: any.

    Raises `ConfigError` if there is no statement, one is not signed, or one is of another witness.
    """
    stated = statements(place)
    if not stated:
        raise ConfigError(f"{place.url} has no statement of a witness: `diloco witness URL --to …` makes them.")
    if other := next((each for each in stated if witness not in (None, each.witness)), None):
        raise ConfigError(f"{place.url}/{other.key} is by {other.witness}, not by {witness}.")
    return [Noted(each.head, f"was seen by {each.witness[:24]}… {_time_of(each)}", each.run_sha256) for each in stated]


def _time_of(stated: Witnessed) -> str:
    when = datetime.datetime.fromtimestamp(stated.at, datetime.UTC)
    return f"on {when:%Y-%m-%d} at {when:%H:%M:%S} UTC"
