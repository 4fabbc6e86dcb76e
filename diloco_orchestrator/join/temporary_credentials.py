"""Mints temporary S3 credentials for one invited replica: it reads the run, and creates objects of its own alone.

The store's security token service (STS) makes them, and forgets them when their time is over. Where the store is
Cloudflare's, `r2_credentials` does.
"""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from diloco_orchestrator.clock import SystemClock
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.join import r2_credentials
from diloco_orchestrator.join.link import Credentials
from diloco_orchestrator.redaction import redact
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import options_elsewhere

SHORTEST_S = 900.0  # for which AWS gives temporary credentials
_HOUR_S = 3600.0
_LONGEST_S = {"role": 12 * _HOUR_S, "user": 36 * _HOUR_S}  # likewise, of a role and of a user's federation token
_LONGEST_POLICY = 2048  # characters, of AWS
# What an invited replica creates, below the run's folder; the policy of infra/iam/one-replica.json without what any
# replica may write: commits, averages, snapshots, the first base, segments, results.
_OWN = (
    "replicas/{id}/*",
    "start/{id}/*",
    "rounds/*/payload/{id}/*",
    "rounds/*/contributions/{id}.json/*",
    "rounds/*/checked/{id}.*",
    "rounds/*/want/*",
    "join/*/dl-*-r{id}-a*/*",
)


def policy_of(bucket: str, prefix: str, replica_id: int) -> dict[str, Any]:
    """The IAM policy of an invited replica of the run in `bucket` below `prefix`."""
    folder = f"arn:aws:s3:::{bucket}/{prefix}/" if prefix else f"arn:aws:s3:::{bucket}/"
    return {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Action": "s3:GetObject", "Resource": f"{folder}*"},
            {
                "Effect": "Allow",
                "Action": "s3:PutObject",
                "Resource": [folder + each.format(id=replica_id) for each in _OWN],
            },
            {
                "Effect": "Allow",
                "Action": "s3:ListBucket",
                "Resource": f"arn:aws:s3:::{bucket}",
                "Condition": {"StringLike": {"s3:prefix": f"{prefix}/*" if prefix else "*"}},
            },
        ],
    }


def longest_s(url: str, role: str | None) -> float:
    """The most seconds for which the store of a run gives temporary credentials. `role`: as for `mint`."""
    is_r2 = r2_credentials.account_of(_endpoint_of(url, {}))
    return r2_credentials.LONGEST_S if is_r2 else _LONGEST_S["role" if role else "user"]


def mint(
    store: Store, replica_id: int, lasts_s: float, role: str | None, storage_options: Mapping[str, Any] | None = None
) -> Credentials:
    """Credentials for an invited replica of the run in `store`, which end after `lasts_s` seconds, at least 900.

    They can do no more than this process's own. `role`: the role to assume; None: a federation token of the account's
    user. `storage_options`: credentials and endpoint of the store, beside this process's environment. Raises
    `ConfigError` for a store without a token service, and in its words if it refuses.
    """
    from diloco_orchestrator.store.s3 import keys_of_account, token_service

    url = store.url
    if r2_credentials.account_of(endpoint := _endpoint_of(url, storage_options or {})):
        if role is not None:
            raise ConfigError(f"{url} is in Cloudflare R2, which has no roles: leave --role out.")
        parent, now = keys_of_account(url, storage_options or {}), SystemClock().wall_time()
        return r2_credentials.mint_r2(store, replica_id, lasts_s, endpoint, parent, now)
    if not url.startswith(("s3://", "s3a://")):
        raise ConfigError(
            f"{url} mints no temporary credentials here, only S3 stores with AWS's token service do. Pass "
            "--presigned on GCS and Azure, or --own-credentials if the machine that joins has its own, or needs none."
        )
    parts = urlsplit(url)
    policy = json.dumps(policy_of(parts.netloc, parts.path.strip("/"), replica_id), separators=(",", ":"))
    if len(policy) > _LONGEST_POLICY:
        raise ConfigError(
            f"the policy of a replica of {url} has {len(policy)} characters, and AWS takes {_LONGEST_POLICY}: the "
            "folder's name is too long. Launch the run in a folder with a shorter one."
        )
    sts = token_service(url, storage_options or {})
    name, duration = f"diloco-replica-{replica_id}", int(lasts_s)
    try:
        if role is None:
            answer = sts.get_federation_token(Name=name, Policy=policy, DurationSeconds=duration)
        else:
            answer = sts.assume_role(RoleArn=role, RoleSessionName=name, Policy=policy, DurationSeconds=duration)
    except Exception as error:  # botocore's errors share no base with others
        raise ConfigError(
            f"{sts.meta.endpoint_url} gives no temporary credentials: {redact(str(error), {})} Name a role that may be "
            "assumed (--role ARN), ask for a shorter time (--credentials-last; a role of AWS gives one hour unless it "
            "says more), or pass --own-credentials if the machine that joins has some of its own."
        ) from None
    found = answer["Credentials"]
    return Credentials(
        key=found["AccessKeyId"],
        secret=found["SecretAccessKey"],
        token=found["SessionToken"],
        not_after=found["Expiration"].timestamp(),
    )


def _endpoint_of(url: str, storage_options: Mapping[str, Any]) -> str:
    return str(options_elsewhere(url, storage_options).get("endpoint_url") or "")
