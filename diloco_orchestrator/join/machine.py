"""`Machine`: takes offered attempts of a run and runs them on this machine, one at a time, until the run is over.

`join.executor` is the other side. A machine needs nothing but the bucket; whoever can write there decides what it runs.
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from diloco_orchestrator.clock import Clock
from diloco_orchestrator.errors import ConfigError, NoSuchRun, ObjectMissing, RecordInvalid, StoreFull, StoreUnavailable
from diloco_orchestrator.executors.contract import ReplicaState, ReplicaStatus
from diloco_orchestrator.executors.process_contract import EXIT_DONE, EXIT_ERROR, EXIT_PREEMPTED, KEY_VARIABLES
from diloco_orchestrator.join.attempt import LocalProcess, Start, TakenAttempt
from diloco_orchestrator.join.grants import Lent
from diloco_orchestrator.join.offers import name_of, offers_in, records_about, who
from diloco_orchestrator.protocol import keys, pace
from diloco_orchestrator.protocol.attempt_records import Offer, Taken
from diloco_orchestrator.protocol.digests import Sha256, sha256_hex
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.run_log.entries import Entry
from diloco_orchestrator.run_log.reader import read_optional
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.run_log.run_store import ENV_ATTEMPT_KEY, as_attempt, check_signed_by, identity_of_user, of_run
from diloco_orchestrator.run_log.run_store import Identity as UserIdentity
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

MOST_EVERY_S = 30.0  # a quarter of the default `lost_after_s`

_NOT_FREE = {
    keys.JOIN_TAKEN,
    keys.JOIN_CANCEL,
    keys.JOIN_END,
}  # an offer with one of these records cannot be taken any more
_FAILURES = 3  # attempts in a row that fail here, after which the fault is more likely this machine's


@dataclass(frozen=True)
class JoinSettings:
    """The user's settings for the machine that joins."""

    replica: int | None = None  # take offers of this replica_id only; None: of any
    once: bool = False  # leave after one attempt
    hours: float | None = None  # leave so many hours after `Machine` was made, on its clock; None: stay
    gpus: str | None = None  # CUDA_VISIBLE_DEVICES of the replica, such as "2,3"; None: as it is here
    ranks: int | None = None  # processes that train a replica together here; None: as the run's configuration says
    # Seconds between two requests to the bucket, well below the executor's lost_after_s; more in a store that limits
    # requests, at most `MOST_EVERY_S`.
    every_s: float = 5.0
    signed_by: str | None = None  # the public key that must have signed the run; None: any or none
    run_sha256: str | None = None  # that run.json must have, as a link says; None: any
    user: UserIdentity | None = None  # to which an attempt's keys are sealed; None: that of this user


@dataclass(frozen=True)
class Identity:
    """The machine that takes an offered attempt, as named in the record by which it takes it (`Taken`)."""

    token: str  # random, other for each process
    host: str  # for people
    pid: int  # of `diloco join`, for people


class Machine:
    """One machine that has joined the folder of one run, which may be launched later.

    It runs the offered commands, as far as `why_not` allows them.

    Args:
        store: the run's folder, opened with this machine's credentials.
        settings: the user's.
        identity: of this machine.
        environ: of this process; replicas inherit it, and it must have the run's secrets.
        clock: time, in seconds; for `settings.hours` and all pauses.
        stamp: write ids and times for records.
        say: prints a line for people.
        why_not: reason why an offer is not run here; empty if it may be.
        start: starts a replica's process.
        lent: temporary access to the store by an invitation's link, renewed here; None: the machine has an account.
    """

    def __init__(
        self,
        store: Store,
        settings: JoinSettings,
        identity: Identity,
        *,
        environ: Mapping[str, str],
        clock: Clock,
        stamp: Stamp,
        say: Callable[[str], None],
        why_not: Callable[[Offer], str] = lambda offer: "",
        start: Start = LocalProcess,
        lent: Lent | None = None,
    ) -> None:
        self._bucket = store
        self._why_not = why_not
        self._settings = settings
        self._identity = identity
        self._environ = environ
        self._clock = clock
        self._stamp = stamp
        self._say = say
        self._start = start
        self._lent = lent
        self._leave_at = None if settings.hours is None else clock.now() + 3600 * settings.hours
        self._forget_run()
        self._attempt: TakenAttempt | None = None
        self._leaving = ""
        self._signalled = False
        self._said = ""

    def _forget_run(self) -> None:
        """Forget the run and its offers: in a folder that is emptied and used anew, names of attempts come again."""
        self._store = of_run(self._bucket, {})
        self._log: RunLog | None = None
        self._read: dict[str, bytes] = {}  # of offers, by the attempt's name, the oldest reading first
        self._refused: dict[str, str] = {}  # digests of offers that this machine cannot run, likewise
        self._keys: dict[str, str] = {}  # of attempts of a signed run, by name

    def leave(self, why: str) -> None:
        """Ask the replica's process on this machine to end, and `run` to return; a second call kills it.

        For signal handlers. `why`: reason, for records.
        """
        again, self._signalled = self._signalled, True
        self._leaving = self._leaving or why
        if self._attempt is not None:
            if again:
                self._attempt.kill()
            else:
                self._attempt.ask_to_end()

    def why_leaving(self) -> str:
        """Reason why this machine leaves before the run is over; empty while it stays."""
        if not self._leaving and self._leave_at is not None and self._clock.now() >= self._leave_at:
            self._leaving = f"{self._settings.hours:g} hours are over"
        return self._leaving

    def run(self) -> int:
        """Take and run offered attempts until the run is over; returns the exit code of `diloco join`.

        0: the run or the hours are over, or the one attempt succeeded. 75: a signal asked it to leave. Otherwise the
        exit code of the one attempt, or 1 after several attempts in a row that failed here. Raises `ConfigError` for a
        run whose secrets this machine lacks, and the store's errors but `StoreUnavailable` and `StoreFull`.
        """
        failures = 0
        while not self.why_leaving():
            try:
                if ending := self._end_of_run():
                    self._say(ending)
                    return EXIT_DONE
                if self._lent is not None and self._log is not None:  # the run that the link names
                    self._lent.look(self._store)
                offer = self._take()
            except (StoreUnavailable, StoreFull) as error:
                log.warning("%s", error)
                offer = None
            if offer is None:
                self._say_once(f"waiting for a replica of {self._store.url}")
                self._clock.sleep(self._every_s())
                continue
            end, self._said = self._serve(offer), ""
            failures = failures + 1 if end.state is ReplicaState.FAILED else 0
            if self._settings.once and not self._leaving:
                return end.exit_code if end.exit_code is not None and end.exit_code >= 0 else EXIT_ERROR
            if failures == _FAILURES:
                self._say(f"{failures} attempts in a row failed here, so this machine leaves: `diloco doctor`")
                return EXIT_ERROR
        self._say(f"left: {self._leaving}")
        return EXIT_PREEMPTED if self._signalled else EXIT_DONE

    def _every_s(self) -> float:
        """Seconds between two requests: as set, or as far apart as other processes of the run poll its store."""
        apart_s = pace.apart_s(self._log.run.config, self._store.requests_allowed) if self._log is not None else 0.0
        return max(self._settings.every_s, min(apart_s, MOST_EVERY_S))

    def _say_once(self, words: str) -> None:
        if words != self._said:
            self._said = words
            self._say(words)

    # -- the run and its offers ----------------------------------------------------------------------------------

    def _end_of_run(self) -> str:
        """A sentence about how the run ended; empty before its end. Raises `ConfigError` for missing secrets.

        The run is the one that is in the folder now. A GET, and a LIST request once there is a run.
        """
        run_json = read_optional(self._bucket, keys.RUN)
        if self._log is not None and (run_json is None or sha256_hex(run_json) != self._log.run_sha256):
            self._forget_run()
        if self._log is None:
            try:
                self._log = RunLog(self._store)
            except NoSuchRun:
                return ""
            check_signed_by(self._log.run, self._store.url, self._settings.signed_by)
            if self._settings.run_sha256 is not None:
                check_is_run_of_link(self._log, self._settings.run_sha256)
            if self._log.run.signed_by is not None:
                self._say(f"it is signed by {self._log.run.signed_by.key}; this machine is {self._user.public.text()}")
            self._check_secrets(self._log.run.secret_names, f"run {self._log.run.run_id}")
        try:
            newest = self._log.newest_leg()
            result = self._log.result(newest) if newest and self._log.has_result(newest) else None
        except RecordInvalid as error:
            self._say_once(f"it cannot be told whether the run is over, so this machine stays: {error}")
            return ""
        return "" if result is None else f"the run is over: {result.status}, {result.reason}"

    def _check_secrets(self, names: tuple[str, ...], whose: str) -> None:
        if absent := [name for name in names if name not in self._environ]:
            raise ConfigError(
                f"{whose} needs the secrets {', '.join(absent)}, which no bucket holds. Export them on this machine, "
                "then join again."
            )

    def _take(self) -> Entry[Offer] | None:
        """Take an offered attempt that no machine has taken; None if there is none for this machine."""
        if self._log is None and self._settings.signed_by is not None:
            return None  # nobody has signed what lies in a folder without a run
        listed = offers_in(self._store.list(keys.JOINS))
        self._read = {name: data for name, data in self._read.items() if name in listed}
        if self._read:
            del self._read[next(iter(self._read))]  # read again: another offer may have its name by now
        # Names without a record about an offer first: others are spent as a rule, and a long run has many of these.
        # Then low ids: a run that can be scaled offers ids that its first round does not wait for.
        for name in sorted(listed, key=lambda name: (len(listed[name]) > 1, len(name), name)):
            data = self._bytes_of(name)
            if data is None or self._refused.get(name) == (sha256 := sha256_hex(data)):
                continue
            if records_about(listed, name, sha256) & _NOT_FREE:
                continue
            offer = self._offer(name, data)
            if offer is None or self._settings.replica not in (None, offer.record.replica_id):
                continue
            if read_optional(self._store, keys.join_offer(name)) != data:
                del self._read[name]  # withdrawn, and perhaps offered anew: read again in the next pass
                continue
            me = self._identity
            taken = Taken(**self._stamp(), by=me.token, host=me.host, pid=me.pid)
            key = keys.join_record(name, offer.sha256, keys.JOIN_TAKEN)
            if Writer(self._store_of(name), Role.MACHINE).create(taken, key) is not None:
                return offer
        return None

    def _bytes_of(self, name: str) -> bytes | None:
        """The bytes of the record that offers an attempt, as first read, cached; None if it was deleted."""
        if name not in self._read:
            data = read_optional(self._store, keys.join_offer(name))
            if data is None:
                return None
            self._read[name] = data
        return self._read[name]

    def _offer(self, name: str, data: bytes) -> Entry[Offer] | None:
        """The offered attempt in `data`; None if it is unreadable, may not run here, or needs secrets missing here."""
        key = keys.join_offer(name)
        try:
            offer = Offer.from_bytes(data, key)
            if name_of(offer) != name:
                raise RecordInvalid(f"{key} offers {name_of(offer)}: was it put there by hand?")
            if self._settings.replica in (None, offer.replica_id):
                if why := self._why_not(offer):
                    raise ConfigError(f"{key}: {why}")
                self._check_secrets(offer.secret_names, who(offer))
                if self._log is not None and self._log.run.signed_by is not None:
                    self._keys[name] = self._keys_in(offer)
        except NoSuchRun:
            return None  # the folder is being emptied
        except (RecordInvalid, ConfigError) as error:
            self._say(f"not taken: {error}")
            self._refused[name] = sha256_hex(data)
            return None
        return Entry(offer, sha256_hex(data))

    @cached_property
    def _user(self) -> UserIdentity:
        return self._settings.user or identity_of_user()

    def _keys_in(self, offer: Offer) -> str:
        """The attempt's keys, sealed in its offer for this machine's user. Raises `ConfigError` if they are not."""
        sealed = (offer.sealed or {}).get(self._user.public.digest)
        if sealed is None and self._settings.run_sha256 is not None:
            raise ConfigError(f"{who(offer)}: its keys are not for this link, which was revoked or has expired")
        if sealed is None:
            raise ConfigError(
                f"{who(offer)}: its keys are for other machines. Launch or attach the run with --machines, "
                f"JoinExecutor(machines=[…]), of this one too: {self._user.public.text()}"
            )
        return self._user.opened(name_of(offer), sealed).decode()

    def _store_of(self, name: str) -> Store:
        """The run's folder for what this machine writes about an attempt: of a signed run, with the attempt's keys."""
        return as_attempt(self._store, self._keys[name]) if name in self._keys else self._store

    # -- one attempt ---------------------------------------------------------------------------------------------

    def _serve(self, taken: Entry[Offer]) -> ReplicaStatus:
        """Run an attempt that this machine has taken until its end, and record that end."""
        offer = taken.record
        folder = Path(tempfile.mkdtemp(prefix="diloco-join-"))
        gpus = {} if self._settings.gpus is None else {"CUDA_VISIBLE_DEVICES": self._settings.gpus}
        keys_of_attempt = {ENV_ATTEMPT_KEY: self._keys[name]} if (name := name_of(offer)) in self._keys else {}
        ranks = [] if self._settings.ranks is None else ["--ranks", str(self._settings.ranks)]
        attempt = TakenAttempt(
            self._store_of(name),
            offer,
            taken.sha256,
            folder,
            arguments=ranks,
            env={
                **{name: value for name, value in self._environ.items() if name not in KEY_VARIABLES},
                **gpus,
                **keys_of_attempt,
            },
            clock=self._clock,
            stamp=self._stamp,
            every_s=self._every_s(),
            leaving=self.why_leaving,
            start=self._start,
            lent=self._lent,
        )
        end = ReplicaStatus(ReplicaState.FAILED, "exit")
        try:
            end = self._run(attempt, offer)
            if not attempt.record(end):
                self._say(f"{who(offer)}: its coordinator has given it up; another machine may have it")
        except (StoreUnavailable, StoreFull) as error:
            self._say(f"{who(offer)}: its end could not be recorded: {error}")
        finally:
            attempt.kill()
            self._attempt = None
            shutil.rmtree(folder, ignore_errors=True)
        self._say(f"{who(offer)}: {end.state}" + (f" ({end.message})" if end.message else ""))
        return end

    def _run(self, attempt: TakenAttempt, offer: Offer) -> ReplicaStatus:
        try:
            attempt.begin()
        except (ObjectMissing, OSError) as error:
            return ReplicaStatus(ReplicaState.FAILED, "exit", message=f"it could not be started here: {error}")
        self._attempt = attempt
        self._say(f"{who(offer)}: runs here as process {attempt.pid}")
        if self.why_leaving():  # asked for between the start and the line above
            attempt.ask_to_end()
        return attempt.attend()


def check_is_run_of_link(run_log: RunLog, run_sha256: Sha256) -> None:
    """Raise `ConfigError` unless run.json has the sha256 that a link names."""
    if run_log.run_sha256 != run_sha256:
        raise ConfigError(
            f"{run_log.store.url} holds another run than the link names: it was replaced. Ask for another link."
        )
