"""`JoinExecutor`: offers attempts as records in the run's folder, for machines that run `diloco join`.

The launcher starts no process and reaches no machine; all communication is through the bucket. `join.machine` is the
other side, `protocol.attempt_records` has the records.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from shlex import quote
from typing import Any
from urllib.parse import unquote, urlsplit

from diloco_orchestrator.clock import SystemClock, random_token
from diloco_orchestrator.code_archive import bootstrap
from diloco_orchestrator.errors import ConfigError, RecordInvalid, StoreDenied, StoreError, StoreUnavailable
from diloco_orchestrator.executors.clock import Clock
from diloco_orchestrator.executors.constructor_options import plain_options
from diloco_orchestrator.executors.contract import (
    ExecutorDenied,
    ExecutorError,
    LaunchRequest,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    Unavailable,
    in_order,
)
from diloco_orchestrator.executors.remote_base import RemoteExecutor, attempt_name, run_label
from diloco_orchestrator.join.grants import renew_grants
from diloco_orchestrator.join.invitations import ANEW, end_offers, end_revoked, invitations_to
from diloco_orchestrator.join.link import Credentials
from diloco_orchestrator.join.offers import by_attempt, name_of, offers_in, records_about
from diloco_orchestrator.join.output import lines_of
from diloco_orchestrator.join.temporary_credentials import mint
from diloco_orchestrator.join.windows import Windows
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import JoinCancel, JoinEnd, Lease, Offer, Taken
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.kinds import Role
from diloco_orchestrator.protocol.process import ENV_STORAGE_OPTIONS
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.redaction import secret_settings
from diloco_orchestrator.run_log.entries import Entry
from diloco_orchestrator.run_log.reader import read, read_optional, read_record
from diloco_orchestrator.run_log.run_store import ENV_ATTEMPT_KEY, PublicIdentity, is_signed, of_run
from diloco_orchestrator.run_log.writer import Writer
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import absolute_url, open_store
from diloco_orchestrator.store.retrying import RetryPolicy
from diloco_orchestrator.store.signers import signer_of

log = logging.getLogger(__name__)

_RETRY = RetryPolicy(total_s=2.0)  # `poll` must not wait; whoever calls repeats what failed
# Seconds without a sign of life after which the exit record of an attempt is looked for. A machine that is still there
# records the end itself, as soon as its process has ended.
_LEFT_S = 10.0
_RENEW_S = 10.0  # between two polls for temporary credentials that are due, which live for minutes or more
_SIGN_S = 2.0  # likewise for objects for which no request is signed
_FOLLOW_S = 2.0  # pause before output is asked for again
# Secrets of every launch that a machine does not need: it opens the bucket with credentials of its own, and so fetches
# the code. An attempt's keys are sealed in its offer.
_NOT_NEEDED = frozenset({ENV_STORAGE_OPTIONS, bootstrap.ENV_URL, ENV_ATTEMPT_KEY})


class JoinExecutor(RemoteExecutor):
    """Offers each attempt in the run's folder; a machine that runs `diloco join URL` takes it.

    Such a machine needs credentials for the bucket and the run's secrets in its own environment: offers hold none.

    Args:
        machines: Lines that `diloco key --me` prints on the machines, for a signed run: only they get an attempt's
            keys, sealed in its offer. Without them only unsigned runs can be offered.
        lost_after_s: Seconds without a sign of life, on this process's clock, after which a machine counts as lost, and
            its replica is offered again. Machines give one every `diloco join --every` seconds (5, at most 30).
        hourly_usd: What one replica's machine costs in US dollars an hour, for `status` and for max_cost_usd, which is
            refused without it; 0 or more.
        clock: Time, for tests.

    Raises ValueError for a `lost_after_s` that is not above 0 and an `hourly_usd` below 0. Methods raise `Unavailable`
    while the bucket cannot be reached, `ExecutorDenied` where it refuses the credentials, and `ExecutorError` for what
    is in its records, and before `use_store` was called.
    """

    name = "join"
    free_until_taken = True

    def __init__(
        self,
        *,
        machines: Sequence[str] = (),
        lost_after_s: float = 120.0,
        hourly_usd: float | str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.options = plain_options(locals())
        super().__init__(hourly_usd=hourly_usd, clock=clock)
        if not lost_after_s > 0:
            raise ValueError(f"lost_after_s={lost_after_s!r}: machines give a sign of life every few seconds; say 120.")
        self._lost_after_s = lost_after_s
        try:
            lines = machines.split(",") if isinstance(machines, str) else machines
            self._machines = tuple(PublicIdentity.parse(line.strip()) for line in lines)
            self.offers_keys = bool(self._machines)
        except ConfigError as error:
            raise ValueError(f"machines: {error}") from None
        self._stamp = Stamp(random_token(), SystemClock().wall_time)
        self._url: str | None = None
        self._storage_options: Mapping[str, Any] = {}
        self._opened: dict[str, Store] = {}
        # By the offer's digest, because names of attempts come again in a folder that was emptied; so is `_cancelled`.
        self._leases: dict[str, tuple[int, float]] = {}  # newest counter, and when it was seen to change
        self._ended: dict[str, ReplicaStatus] = {}
        self._renew_at = 0.0
        self._sign_at = 0.0
        self._not_renewed: dict[str, str] = {}  # why, as it was said
        self._windows: dict[str, Windows] = {}  # by the run's URL

    def use_store(self, url: str, storage_options: Mapping[str, Any]) -> None:
        """Use the run's folder at `url` for offers. A run calls this itself; without a run, the user does.

        `storage_options`: credentials and endpoint as for `launch`; they stay in this process. Opens nothing yet.
        """
        url = absolute_url(url)
        if (url, dict(storage_options)) != (self._url, dict(self._storage_options)):
            self._url, self._storage_options = url, dict(storage_options)
            self._opened.clear()

    def _store(self, handle: ReplicaHandle | None = None) -> Store:
        """The run's folder; if none was set, that of the handle, opened with this process's credentials."""
        url, options = (self._url, self._storage_options)
        if url is None and handle is not None:
            url, options = str(handle.native["store"]), {}
        if url is None:
            raise ExecutorError(
                "JoinExecutor has no folder in which it could offer anything. Name the run's URL: `diloco doctor URL "
                "--executor join`; without a run call use_store(url, storage_options)."
            )
        if url not in self._opened:
            self._opened[url] = of_run(open_store(url, options, retry=_RETRY))
        return self._opened[url]

    # -- launching -----------------------------------------------------------------------------------------------

    def plan(self, request: LaunchRequest) -> Mapping[str, Any]:
        """The offer of an attempt to machines that join, its key, and the names of secrets that a machine must have
        itself.

        Writes nothing. Raises ValueError if a variable of `request.env` looks like a credential.
        """
        offer = self._offer(request)
        return {
            "offer": json.loads(offer.model_dump_json(exclude={"write_id", "at"})),
            "key": keys.join_offer(attempt_name(request)),
            "from the machine's own environment": list(offer.secret_names),
        }

    def _offer(self, request: LaunchRequest, invited: Sequence[PublicIdentity] = ()) -> Offer:
        """The offer to joining machines for a request, with the attempt's keys for `machines` and for `invited`.

        Raises ValueError for a variable that looks secret.
        """
        if exposed := secret_settings(request.env, "env"):
            raise ValueError(
                f"{', '.join(exposed)} would be written into the bucket with the offer. Pass it as a secret "
                "(secrets={…}, --secret NAME), and export it on the machines that join."
            )
        return Offer(
            **self._stamp(),
            run_id=request.run_id,
            replica_id=request.replica_id,
            attempt=request.attempt,
            command=tuple(request.command),
            env=dict(request.env),
            secret_names=tuple(sorted(request.secrets.keys() - _NOT_NEEDED)),
            sealed=self._sealed(request, invited),
            code=_code_of(request),
            timeout_s=request.timeout_s,
        )

    def _invited(self, store: Store, request: LaunchRequest) -> list[PublicIdentity]:
        """Identities that are invited to run the request's replica and have not expired on this process's clock."""
        if ENV_ATTEMPT_KEY not in request.secrets:
            return []
        now = self._stamp()["at"]
        found = [each for each in invitations_to(store, request.replica_id) if each.not_after > now]
        return [PublicIdentity.parse(each.public) for each in found]

    def _sealed(self, request: LaunchRequest, invited: Sequence[PublicIdentity]) -> dict[str, str] | None:
        """The attempt's keys for each machine that may have them, by its identity's digest; None in an unsigned run."""
        if (secret := request.secrets.get(ENV_ATTEMPT_KEY)) is None:
            return None
        name = attempt_name(request)
        return {each.digest: each.seal(name, secret.encode()) for each in (*self._machines, *invited)}

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        """Create the attempt's offer to joining machines, or adopt the one that exists. Does not wait for a machine.

        Raises ValueError for a variable that looks like a credential, before anything is written.
        """
        self._offer(request)
        name = attempt_name(request)
        with _as_executor_errors():
            store, key = self._store(), keys.join_offer(name)
            offer = self._offer(request, self._invited(store, request))
            if (created := Writer(store, Role.COORDINATOR).create(offer, key)) is not None:
                log.info(
                    "replica %d, attempt %d waits for a machine: diloco join %s%s",
                    request.replica_id,
                    request.attempt,
                    quote(store.url),
                    " --signed-by KEY, as `diloco status` prints it" if ENV_ATTEMPT_KEY in request.secrets else "",
                )
            data = offer.to_bytes() if created is not None else read_record(store, key)
            sha256 = sha256_hex(data)
            # Who invites or revokes ends an offer that is there. This one may have come after, with keys from before.
            end_revoked(store, request.replica_id, self._stamp)
            invited = {each.digest for each in self._invited(store, request)}
            if invited and invited.difference(Offer.from_bytes(data, key).sealed or {}):
                end_offers(store, request.replica_id, ANEW, self._stamp)
            return self._handle(store, offer, sha256)

    def _handle(self, store: Store, offer: Offer, offer_sha256: str) -> ReplicaHandle:
        native = {"store": store.url, "offer": offer_sha256}
        return ReplicaHandle(self.name, offer.run_id, offer.replica_id, offer.attempt, name_of(offer), native)

    # -- polling -------------------------------------------------------------------------------------------------

    def statuses(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """The attempts' statuses by one LIST request, and a GET for each attempt that a machine has taken.

        A machine whose lease (heartbeat record) has not changed for `lost_after_s` on this process's clock is lost for
        good: that is recorded as the attempt's end, which the machine obeys if it comes back. Outages of the bucket do
        not count.
        """
        try:
            with _as_executor_errors():
                stores = [self._store(handle) for handle in handles]
                listed = {url: _listed(store) for url, store in {store.url: store for store in stores}.items()}
                found = [
                    self._status(store, handle, listed[store.url])
                    for store, handle in zip(stores, handles, strict=True)
                ]
                for store in {store.url: store for store in stores}.values():
                    self._renew_grants(store)
                    self._renew_windows(store)
                return found
        except Unavailable:
            self._leases.clear()
            raise

    def _renew_grants(self, store: Store) -> None:
        """Renew the temporary credentials of invited machines that are due. A refusal is logged, and tried again."""
        now = self._clock.now()
        if now < self._renew_at or not is_signed(store):
            return

        def minted(replica_id: int, lasts_s: float, role: str | None) -> Credentials:
            return mint(store, replica_id, lasts_s, role, self._storage_options)

        self._renew_at, why = now + _RENEW_S, ""
        try:
            renew_grants(store, minted, self._stamp)
        except (ConfigError, RecordInvalid) as error:  # the latter of the log, by which R2's are for rounds
            why = str(error)
        self._say_once("temporary credentials", why)

    def _renew_windows(self, store: Store) -> None:
        """Renew the signed requests of invited machines, which see the run as it was then. A refusal is logged."""
        now = self._clock.now()
        if now < self._sign_at or not is_signed(store):
            return
        self._sign_at, why = now + _SIGN_S, ""
        try:
            if store.url not in self._windows and any(True for _ in store.list(keys.WINDOWS)):
                self._windows[store.url] = Windows(store, signer_of(store.url, self._storage_options), self._stamp)
            if (windows := self._windows.get(store.url)) is not None:
                windows.renew()
        except (ConfigError, RecordInvalid) as error:
            why = str(error)
        self._say_once("signed requests", why)

    def _say_once(self, what: str, why: str) -> None:
        if why and why != self._not_renewed.get(what):
            log.warning("%s of invited machines are not renewed, and end: %s", what, why)
        self._not_renewed[what] = why

    def _status(self, store: Store, handle: ReplicaHandle, listed: Mapping[str, set[keys.JoinKey]]) -> ReplicaStatus:
        name, offer = handle.native_id, _offer_in(handle)
        if offer in self._ended:
            return self._ended[offer]
        records = records_about(listed, name, offer)
        if keys.JOIN_OFFER not in records:
            return _lost("its offer is gone from the bucket") if offer not in self._cancelled else _CANCELLED
        if keys.JOIN_END not in records:
            if keys.JOIN_TAKEN not in records:
                return ReplicaStatus(ReplicaState.PENDING, native_state="offered", message="no machine has joined yet")
            silence_s = self._silence_s(offer, _counter_of(store, name, offer))
            has_left = silence_s > _LEFT_S and _has_exit(store, handle)
            if silence_s <= self._lost_after_s and not has_left:
                return ReplicaStatus(ReplicaState.RUNNING, native_state="taken")
            why = "its replica has ended, and its machine has left" if has_left else "its machine gives no sign of life"
            end = _CANCELLED if keys.JOIN_CANCEL in records else _lost(why)
            self._create_end(store, name, offer, end)
        self._ended[offer] = _end_of(store, name, offer)
        return self._ended[offer]

    def _silence_s(self, offer: str, counter: int) -> float:
        """Seconds, on this process's clock, since the counter in a machine's lease changed; 0 when first seen."""
        now = self._clock.now()
        if self._leases.get(offer, (-1, 0.0))[0] != counter:
            self._leases[offer] = (counter, now)
        return now - self._leases[offer][1]

    def _create_end(self, store: Store, name: str, offer: str, status: ReplicaStatus) -> None:
        end = JoinEnd(**self._stamp(), state=status.state, reason=status.reason, message=status.message)
        Writer(store, Role.COORDINATOR).create(end, keys.join_record(name, offer, keys.JOIN_END))

    # -- ending --------------------------------------------------------------------------------------------------

    def cancel(self, handle: ReplicaHandle) -> None:
        """Withdraw the attempt's offer, or ask its machine to end it, by a record that every process sees.

        Does nothing for an attempt that has ended, or whose offer was deleted. Returns before the machine has obeyed,
        which takes up to a minute.
        """
        name, offer = handle.native_id, _offer_in(handle)
        with _as_executor_errors():
            store = self._store(handle)
            records = records_about(_listed(store, name), name, offer)
            if keys.JOIN_OFFER not in records or keys.JOIN_END in records:
                return
            self._cancelled.add(offer)
            writer, taken = Writer(store, Role.COORDINATOR), keys.join_record(name, offer, keys.JOIN_TAKEN)
            if keys.JOIN_TAKEN not in records and writer.create(Taken(**self._stamp(), by=""), taken) is not None:
                self._create_end(store, name, offer, _CANCELLED)
                return
            writer.create(JoinCancel(**self._stamp()), keys.join_record(name, offer, keys.JOIN_CANCEL))

    def logs(self, handle: ReplicaHandle, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        """Lines of the attempt's output that its machine has written to the bucket, some seconds late while it runs.

        `follow`: go on until the attempt has ended. `tail`: only this many of the last lines that exist now.
        """
        with _as_executor_errors():
            store = self._store(handle)
            passes = self._passes(handle) if follow else iter([True])
            yield from lines_of(store, handle.native_id, tail=tail, passes=passes)

    def _passes(self, handle: ReplicaHandle) -> Iterator[bool]:
        """One bool per pass over the attempt's output: whether the attempt had ended before it; True is the last."""
        while not self.poll(handle).state.ended:
            yield False
            self._clock.sleep(_FOLLOW_S)
        yield True

    def find(self, run_id: str) -> list[ReplicaHandle]:
        """Handles of all attempts of the run offered to joining machines, including ended ones."""
        with _as_executor_errors():
            store = self._store()
            found = [
                self._handle(store, offer.record, offer.sha256)
                for name in offers_in(store.list(keys.JOINS))
                for offer in [_offer_of(store, name)]
                if offer is not None and offer.record.run_id == run_id
            ]
        return in_order(found)

    def forget(self, run_id: str) -> None:
        """Delete the run's offers, so that machines end their attempts, then ends and output, from the bucket."""
        of_run = re.compile(rf"dl-{re.escape(run_label(run_id))}-r[0-9]+-a[0-9]+")
        with _as_executor_errors():
            store = self._store()
            listed = _listed(store)
            for name in sorted(name for name in listed if of_run.fullmatch(name)):
                store.delete(keys.join_offer(name))
                # Without a record the name would not be found again, so the output goes before the others.
                for info in list(store.list(keys.join_output(name))):
                    store.delete(info.key)
                for each in sorted(listed[name], key=lambda each: (each.record, each.offer)):
                    store.delete(
                        keys.join_record(name, each.offer, each.record) if each.offer else keys.join_offer(name)
                    )


_CANCELLED = ReplicaStatus(ReplicaState.CANCELLED, "user", None, "cancelled", "cancelled")


def _code_of(request: LaunchRequest) -> str | None:
    """The key of the request's code archive in the run's folder; None if it has none."""
    sha256 = request.env.get(bootstrap.ENV_SHA256)
    if sha256 is None:
        return None
    # `diloco doctor` has an archive of its own, whose key is in the URL that it has signed.
    path = unquote(urlsplit(request.secrets.get(bootstrap.ENV_URL, "")).path)
    _, found, rest = path.rpartition(f"/{keys.DOCTOR}")
    return f"{keys.DOCTOR}{rest}" if found else keys.code(sha256)


def _lost(why: str) -> ReplicaStatus:
    return ReplicaStatus(ReplicaState.PREEMPTED, "lost", None, "lost", why)


def _listed(store: Store, name: str = "") -> dict[str, set[keys.JoinKey]]:
    """Keys of offers to joining machines and of their records, by attempt name, or of attempt `name`. One LIST."""
    return by_attempt(store.list(f"{keys.JOINS}{name}/" if name else keys.JOINS))


def _offer_in(handle: ReplicaHandle) -> str:
    return str(handle.native.get("offer", ""))


def _offer_of(store: Store, name: str) -> Entry[Offer] | None:
    """The record that offers the attempt `name` to joining machines; None if it is gone, or cannot be read (logged)."""
    try:
        return read(store, Offer, keys.join_offer(name))
    except RecordInvalid as error:
        log.warning("passed over: %s", error)
        return None


def _has_exit(store: Store, handle: ReplicaHandle) -> bool:
    """Whether the attempt's replica wrote an exit record, which says more than that its machine is lost."""
    return read_optional(store, keys.exit_record(handle.replica_id, handle.attempt)) is not None


def _counter_of(store: Store, name: str, offer: str) -> int:
    """The counter of the lease by which a joined machine shows that it is alive; 0 if missing or unreadable."""
    try:
        lease = read(store, Lease, keys.join_record(name, offer, keys.JOIN_LEASE))
    except RecordInvalid:
        return 0
    return 0 if lease is None else lease.record.counter


def _end_of(store: Store, name: str, offer: str) -> ReplicaStatus:
    """The recorded end of an attempt on a joined machine. A record that cannot be read counts as a lost machine."""
    key = keys.join_record(name, offer, keys.JOIN_END)
    try:
        end = JoinEnd.from_bytes(read_record(store, key), key)
        state = ReplicaState(end.state)
    except (RecordInvalid, ValueError) as error:
        return _lost(f"its end cannot be read: {error}")
    if not state.ended:
        return _lost(f"its end names the state {end.state}")
    return ReplicaStatus(state, end.reason, end.code, "ended", end.message)


@contextmanager
def _as_executor_errors() -> Iterator[None]:
    """Context that turns the store's errors into executor errors, which the coordinator handles."""
    try:
        yield
    except StoreUnavailable as error:
        raise Unavailable(str(error)) from error
    except StoreDenied as error:
        raise ExecutorDenied(str(error)) from error
    except (StoreError, RecordInvalid) as error:
        raise ExecutorError(str(error)) from error
