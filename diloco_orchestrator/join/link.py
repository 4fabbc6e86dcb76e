"""The link of an invitation: one text with all that a machine without any account needs to run one replica.

It is a secret: who has it can run that replica until the invitation is revoked or its time is over.
"""

import base64
import binascii
from typing import Self

from pydantic import Field, ValidationError

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.digests import Sha256, sha256_hex
from diloco_orchestrator.protocol.record_format import Part, canonical_json
from diloco_orchestrator.protocol.signatures import KEY_BYTES, PublicKey, from_text

BEGINNING = "diloco-link-"
_CHECK_DIGITS = 16  # of the digest before the content, with which a damaged link does not agree


class Credentials(Part):
    """Temporary credentials of an S3 store: one set, or one that reads and one that creates objects."""

    key: str = Field(repr=False)
    secret: str = Field(repr=False)
    token: str = Field(repr=False)
    not_after: float = 0.0  # seconds since 1970, at which the store ends them; 0: not known, in older links
    creates: "Credentials | None" = None  # those that create objects; None: the same ones

    @property
    def reads(self) -> Self:
        """The credentials that read the run, without those that create objects."""
        return self.model_copy(update={"creates": None})

    @property
    def ends(self) -> float:
        """Seconds since 1970 at which the first of these credentials expires; 0 if that is not known."""
        return self.not_after if self.creates is None else min(self.not_after, self.creates.not_after)


class Link(Part):
    """The content of the link by which a launcher invites a stranger's machine to run one replica.

    It says where the run is, which code and keys are its launcher's, and holds temporary credentials.
    """

    url: str  # the run's folder
    endpoint_url: str = ""  # of an S3 store that is not Amazon's
    region_name: str = ""
    run_sha256: Sha256  # of run.json, which names the digest of the code
    code_sha256: Sha256  # of the only code that the machine runs
    signed_by: PublicKey
    replica_id: int = Field(ge=0)
    seed: str = Field(repr=False)  # of the identity to which keys are sealed, 43 characters
    # Of two sets those that read: with them the machine finds both in the bucket. None: it has its own, or needs none.
    credentials: Credentials | None = None
    # Signed requests (`store.presigned.Requests`, URL-safe base64), by which the machine finds its window in the
    # bucket, where the store mints no credentials.
    requests: str = Field(default="", repr=False)
    not_after: float  # seconds since 1970; for people: the machine's own clock decides nothing

    def text(self) -> str:
        """The link, a secret."""
        data = canonical_json(self.model_dump(mode="json", exclude_defaults=True))
        checked = sha256_hex(data)[:_CHECK_DIGITS].encode() + data
        return BEGINNING + base64.urlsafe_b64encode(checked).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The link from its text. Raises `ConfigError`, which shows nothing of it, if it was cut or changed."""
        try:
            body = "".join(text.split()).removeprefix(BEGINNING)  # mail programs break lines
            checked = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
            data = checked[_CHECK_DIGITS:]
            if sha256_hex(data)[:_CHECK_DIGITS].encode() != checked[:_CHECK_DIGITS]:
                raise ValueError("another digest")
            link = cls.model_validate_json(data)
            from_text(link.seed, KEY_BYTES)
        except (ValidationError, ValueError, binascii.Error):
            raise ConfigError(
                "this link was cut or changed on its way: it begins with diloco-link- and goes on for several hundred "
                "characters, all of which are needed. Copy it again, or ask for another one."
            ) from None
        return link

    def storage_options(self) -> dict[str, str]:
        """The storage options, without credentials, with which a machine opens the run's folder."""
        where = {"endpoint_url": self.endpoint_url, "region_name": self.region_name}
        return {name: value for name, value in where.items() if value}

    def environ(self) -> dict[str, str]:
        """The variables by which a replica finds the store of the run's folder."""
        named = {"AWS_ENDPOINT_URL": self.endpoint_url, "AWS_REGION": self.region_name}
        return {name: value for name, value in named.items() if value}


# Variables by which SDKs of AWS, Azure and Google find credentials of this machine's user; AWS's before a profile.
OF_ACCOUNTS = frozenset(
    {
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE"),
        *("AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "GOOGLE_APPLICATION_CREDENTIALS"),
        *("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY"),
        *("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_TOKEN"),
        *("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_STORAGE_CONNECTION_STRING"),
    }
)
