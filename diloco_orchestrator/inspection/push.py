"""Sends snapshots of a run to the Hugging Face Hub, each as one commit with a model card, through huggingface_hub.

Credentials are huggingface_hub's own (`hf auth login`, or `HF_TOKEN`); none is ever in a message.
"""

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_orchestrator.errors import ConfigError, StoreDenied, StoreError, StoreUnavailable
from diloco_orchestrator.inspection.model_card import CardFacts, base_of_a_machine, card_files, tag_of
from diloco_orchestrator.inspection.pull import copy_model
from diloco_orchestrator.inspection.sign_model import check_can_sign, sign_folder
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol.legs import check_base
from diloco_orchestrator.protocol.version import VERSION
from diloco_orchestrator.redaction import redact
from diloco_orchestrator.run_log.run_store import check_signed_by
from diloco_orchestrator.store.open_store import INTERACTIVE, absolute_url, open_store

log = logging.getLogger(__name__)

_OUTER = "outer*"  # the outer optimizer's state, which nobody loads from there
_REPLACED = ["*.safetensors", "*.safetensors.index.json"]  # of an earlier commit, where this one has none of the name


@dataclass(frozen=True)
class PushedSnapshot:
    """One snapshot that was sent to the Hugging Face Hub."""

    round: int
    tag: str
    commit: str  # its id there
    url: str


def push(
    url: str,
    repo_id: str,
    rounds: Sequence[int] = (),
    *,
    public: bool = False,
    token: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    sign: bool = False,
    signed_by: str | None = None,
) -> list[PushedSnapshot]:
    """Send the model after each of `rounds` of the run in `url` to the Hub's repository `repo_id` ("user/model").

    One commit for each, oldest first, tagged "round-<n>"; the newest is what `from_pretrained(repo_id)` loads. By
    default one model: the newest, or after a halt by the guard the best by held-out score. The repository is made if it
    is missing. The outer optimizer's state stays in the bucket.

    Args:
        public: make a public repository, or send to one that is public. Default: a private one.
        token: of the Hub; default: the one that huggingface_hub finds.
        storage_options: credentials and endpoint of the bucket in s3fs spelling.
        sign: add a signature of all files by this user (`model.sig`), in the format of OpenSSF's model-signing.
        signed_by: the public key that must have signed the run.

    Raises `ConfigError` for an invalid repository name, without a token, for a public repository without `public`, and
    for a round that has no base or was sent before; `StoreDenied`, `StoreUnavailable` or `StoreError` for the Hub's
    answers; and the errors of `pull`.
    """
    store = open_store(absolute_url(url), storage_options, retry=INTERACTIVE, must_exist=True)
    reader = RunReader(store)
    check_signed_by(reader.run, store.url, signed_by)
    return push_models(reader, repo_id, rounds, public=public, token=token, sign=sign)


def push_models(
    reader: RunReader,
    repo_id: str,
    rounds: Sequence[int] = (),
    *,
    public: bool = False,
    token: str | None = None,
    sign: bool = False,
) -> list[PushedSnapshot]:
    """Send models of the run that `reader` reads to the Hub, as `push` does and with its errors."""
    if sign:
        check_can_sign()
    known = reader.bases()
    chosen = sorted(set(rounds)) or [reader.model().round]
    for round_ in chosen:
        check_base(round_, known, reader.store.url)
    hub = _Hub(repo_id, token)
    hub.prepare(chosen, public=public)
    return [_push_one(reader, hub, round_, [each for each in chosen if each != round_], sign) for round_ in chosen]


def _push_one(reader: RunReader, hub: "_Hub", round_: int, others: Sequence[int], sign: bool) -> PushedSnapshot:
    with tempfile.TemporaryDirectory(prefix="diloco-push-") as parent:
        folder = Path(parent) / "model"
        copy_model(reader.log, folder, round_)
        for name, text in card_files(_facts(reader, hub.repo_id, round_, others), folder).items():
            (folder / name).write_text(text, encoding="utf-8")
        if base := base_of_a_machine(folder):
            log.warning(
                "adapter_config.json names %s as the adapter's base, a path of the machine that trained: everybody "
                "who can read %s reads it, and nobody finds a base there. Write the base's name on the Hub into that "
                "file there.",
                base,
                hub.repo_id,
            )
        if sign:
            sign_folder(folder, but=[path.name for path in folder.glob(_OUTER)])
        return hub.commit(folder, round_, reader.run.run_id)


def _facts(reader: RunReader, repo_id: str, round_: int, others: Sequence[int]) -> CardFacts:
    from diloco_orchestrator.snapshots.rebuild import digest_of_base  # torch, which is slow to import

    config, rows = reader.run.config, reader.rows()
    last = reader.log.newest(reader.log.begins()[-1])
    return CardFacts(
        repo_id=repo_id,
        run_id=reader.run.run_id,
        round=round_,
        replicas=config.replicas,
        sync_every=config.sync_every,
        rows=rows,
        heldout=reader.heldout_of_base(round_),
        base_digest=digest_of_base(reader.log, round_),
        head_sha256=last.sha256 if last else "",
        version=VERSION,
        others=others,
    )


class _Hub:
    """One model repository on the Hugging Face Hub, accessed with one token."""

    def __init__(self, repo_id: str, token: str | None) -> None:
        try:
            from huggingface_hub import HfApi, get_token
        except ModuleNotFoundError as error:
            raise ConfigError(f"push needs huggingface_hub ({error}). Install diloco-orchestrator[hf].") from None
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        try:
            validate_repo_id(repo_id)
        except HFValidationError as error:
            raise ConfigError(f"{repo_id!r} is no name of a repository ({error}). Write it as user/model.") from None
        if repo_id.count("/") != 1:
            raise ConfigError(f"{repo_id!r} names no user or organisation. Write it as user/model.")
        token = token or get_token()
        if token is None:
            raise ConfigError(
                f"there is no token with which to write to {repo_id}. Run `hf auth login`, or set HF_TOKEN. "
                "Nothing was sent."
            )
        self.repo_id = repo_id
        self._token = token
        self._api: HfApi = HfApi(token=token)

    def prepare(self, rounds: Sequence[int], *, public: bool) -> None:
        """Create the repository if missing.

        Raises `ConfigError` if it is public though `public` is False, or already has the tag of one of `rounds`.
        """
        with self._words("preparing the repository"):
            self._api.create_repo(self.repo_id, private=not public, exist_ok=True)
            is_private = self._api.model_info(self.repo_id).private
            tags = {tag.name for tag in self._api.list_repo_refs(self.repo_id).tags}
        if not is_private and not public:
            raise ConfigError(
                f"{self.repo_id} is public on the Hub, and everybody would read the model. Pass --public (public=True) "
                "if that is meant, or name another repository; nothing was sent."
            )
        for round_ in rounds:
            if tag_of(round_) in tags:
                raise ConfigError(
                    f"{self.repo_id} has the tag {tag_of(round_)} already: that round was sent before. Delete the tag "
                    "there, or name another repository; nothing was sent."
                )

    def commit(self, folder: Path, round_: int, run_id: str) -> PushedSnapshot:
        """Upload a folder, the snapshot of `round_`, as one commit to the repository, and tag it."""
        with self._words(f"sending round {round_}"):
            made = self._api.upload_folder(
                repo_id=self.repo_id,
                folder_path=folder,
                ignore_patterns=[_OUTER],
                delete_patterns=_REPLACED,
                commit_message=f"Round {round_} of the run {run_id}",
            )
            self._api.create_tag(self.repo_id, tag=tag_of(round_), revision=made.oid)
        return PushedSnapshot(round_, tag_of(round_), made.oid, str(made.commit_url))

    @contextmanager
    def _words(self, doing: str) -> Iterator[None]:
        """Context that translates errors of huggingface_hub and its connection. `doing`: the action, for messages."""
        from huggingface_hub.errors import HfHubHTTPError

        of_http_library: tuple[Any, ...] = HfHubHTTPError.__bases__
        try:
            yield
        except HfHubHTTPError as error:
            words = getattr(error, "server_message", None) or error.response.reason_phrase
            raise self._error(error.response.status_code, self._said(doing, words)) from None
        except (*of_http_library, OSError) as error:  # no connection
            said = self._said(doing, f"{type(error).__name__}: {error}")
            raise StoreUnavailable(f"{said} Check that this machine reaches the Hub, and try again.") from None

    def _error(self, status: int, said: str) -> StoreError:
        if status in (401, 403):
            return StoreDenied(f"{said} Check the token (HF_TOKEN, `hf auth login`) and its right to write there.")
        if status == 429 or status >= 500:
            return StoreUnavailable(f"{said} This passes; try again later. Rounds that have a tag there were sent.")
        return StoreError(
            f"{said} Correct the request, or look at the repository. Rounds that have a tag there were sent."
        )

    def _said(self, doing: str, words: str) -> str:
        words = redact(words, os.environ).replace(self._token, "<token redacted>")
        return f"{self.repo_id} on the Hub: {doing} failed: {words.rstrip('.')}."
