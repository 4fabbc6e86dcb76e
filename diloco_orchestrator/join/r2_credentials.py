"""Mints temporary credentials of Cloudflare R2 for one invited replica, by the account's own keys, without a request.

R2 accepts a token which the keys of one of the account's API tokens have signed, with operations and paths
(https://developers.cloudflare.com/r2/api/s3/temporary-credentials/). Its paths are for all operations of a set, so that
a replica gets two: one reads the run, the other creates the replica's objects. They have no wildcards, and in keys the
round is before the replica, so that the second set is for the next rounds only, and ends before these are over.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.executors.remote_base import run_label
from diloco_orchestrator.join.link import Credentials
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.record_format import canonical_json
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.base import Store

LONGEST_S = 7 * 86400.0  # for which R2 gives temporary credentials
WINDOW = 32  # rounds whose objects one set creates: a token of some 10 KB, which every request carries
_SHORTEST_S = 120.0  # of a set's life: rounds of five seconds and more do not outrun its renewal
_ROUND_S = 20.0  # the guess of a round's duration while fewer than two are committed
_LATEST = 8  # rounds whose median duration is taken for that of those to come
_READS = ("GetObject", "HeadObject", "ListObjectsV1", "ListObjectsV2")
# No DeleteObject. An object above a GiB is created in parts, once a HEAD request has found none.
_CREATES = (
    *("PutObject", "HeadObject"),
    *("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "AbortMultipartUpload"),
)
# The same objects as in `temporary_credentials`, without wildcards.
_OWN = ("replicas/{id}/", "start/{id}/", "join/attempts/dl-{run}-r{id}-a", "join/output/dl-{run}-r{id}-a")
_OWN_OF_ROUND = ("payload/{id}/", "contributions/{id}.json/", "checked/{id}.", "want/")

_ENDPOINT = re.compile(r"https?://([0-9a-f]{32})(?:\.(?:eu|fedramp))?\.r2\.cloudflarestorage\.com/?")


def account_of(endpoint: str) -> str:
    """The Cloudflare account in the address of an R2 endpoint; empty for any other address."""
    found = _ENDPOINT.fullmatch(endpoint)
    return found[1] if found else ""


def mint_r2(
    store: Store, replica_id: int, lasts_s: float, endpoint: str, parent: Mapping[str, str], now: float
) -> Credentials:
    """Temporary credentials of Cloudflare R2 for an invited replica of the run in `store`.

    They allow to read for `lasts_s` seconds, and to create objects for fewer: those of the rounds from the last one on,
    until half of these should be over, by the duration of the latest ones. `endpoint`: of the account's R2. `parent`:
    `key`, `secret` and `token` of this process's account. `now`: seconds since 1970.
    Raises `ConfigError` if these are temporary themselves, and the store's errors.
    """
    if parent["token"]:
        raise ConfigError(
            f"the credentials of this process for {store.url} are temporary ones, from which R2 derives no others. Use "
            "the access key of an API token of the account, or pass --own-credentials if the machine that joins has "
            "some of its own."
        )
    run_log = RunLog(store)
    bucket, folder = _place(store.url)
    last, round_s = _pace(run_log)
    own = {"id": replica_id, "run": run_label(run_log.run.run_id)}
    paths = [each.format(**own) for each in _OWN]
    for round_ in range(max(1, last), last + WINDOW + 1):
        paths += [f"{keys.ROUNDS}{keys.round_name(round_)}/{each.format(**own)}" for each in _OWN_OF_ROUND]
    creates_s = min(lasts_s, max(_SHORTEST_S, round_s * WINDOW / 2))
    where: dict[str, Any] = {"sub": account_of(endpoint), "aud": urlsplit(endpoint).netloc, "bucket": bucket}

    def signed(scope: str, actions: tuple[str, ...], prefixes: list[str], seconds: float) -> dict[str, Any]:
        ends = int(now + seconds)
        claims = {**where, "iss": parent["key"], "iat": int(now), "exp": ends, "scope": scope}
        claims |= {"actions": list(actions), "paths": {"prefixPaths": prefixes, "objectPaths": []}}
        token = _token(claims, parent["secret"])
        return {
            "key": parent["key"],
            "secret": hashlib.sha256(token.encode()).hexdigest(),
            "token": base64.b64encode(f"jwt/{token}".encode()).decode(),
            "not_after": float(ends),
        }

    creates = signed("object-read-write", _CREATES, [folder + each for each in paths], creates_s)
    return Credentials(**signed("object-read-only", _READS, [folder], lasts_s), creates=Credentials(**creates))


def _place(url: str) -> tuple[str, str]:
    """The bucket of a run, and the prefix of the run's keys in it."""
    parts = urlsplit(url)
    path = parts.path.strip("/")
    return parts.netloc, f"{path}/" if path else ""


def _pace(run_log: RunLog) -> tuple[int, float]:
    """The last committed round, 0 before the first, and the median of the seconds that the latest rounds took."""
    leg = run_log.newest_leg()
    newest = run_log.newest(run_log.begin_of(leg).record) if leg else None
    if newest is None:
        return 0, _ROUND_S
    last = newest.commit.round
    found = [run_log.commit(round_) for round_ in range(max(1, last - _LATEST), last + 1)]
    ends = [each.commit.at for each in found if each is not None]
    return last, median([after - before for before, after in pairwise(ends)] or [_ROUND_S])


def _token(claims: Mapping[str, Any], secret: str) -> str:
    """A JSON web token (RFC 7519) of these claims, by HMAC-SHA256 with the secret."""
    said = ".".join(_plain({"alg": "HS256", "typ": "JWT"}, claims))
    return f"{said}.{_url64(hmac.digest(secret.encode(), said.encode(), 'sha256'))}"


def _plain(*parts: Mapping[str, Any]) -> Iterator[str]:
    return (_url64(canonical_json(dict(each)).rstrip()) for each in parts)


def _url64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
