"""Finds the private keys of a signed run: in the environment, or in this user's state folder."""

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.protocol.digests import Sha256
from diloco_orchestrator.protocol.signatures import SignedBy
from diloco_orchestrator.signing.keys import RunKey, Signer

ENV_RUN_KEY = "DILOCO_RUN_KEY"  # the run's private key, where no state folder holds it
ENV_ATTEMPT_KEY = "DILOCO_ATTEMPT_KEY"  # the keys of a replica's attempt, from its launcher; a secret


def state_folder(environ: Mapping[str, str], name: str) -> Path:
    """A folder of this user's state, readable and writable by this user alone.

    Raises `OSError` if it cannot be made, another user owns it, or others may write to it.
    """
    state = environ.get("XDG_STATE_HOME")
    folder = (Path(state) if state else Path.home() / ".local" / "state") / "diloco-orchestrator" / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{folder} is not a folder that only this user can write to")
    return folder


def keep(key: RunKey, environ: Mapping[str, str]) -> Path:
    """Write the key of a run into this user's state folder, readable by this user alone; returns the file.

    Raises `ConfigError` if it cannot be written: nobody could supervise the run later.
    """
    try:
        path = _path(key.signed_by, environ)
        with suppress(FileExistsError):  # the same key: the file's name is that of its public key
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            os.write(descriptor, f"{key.text()}\n".encode())
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(
            f"the key of the signed run cannot be kept: {error}. Make that folder yours alone, or set {ENV_RUN_KEY}."
        ) from None
    return path


def run_key_of(signed_by: SignedBy, environ: Mapping[str, str]) -> RunKey | None:
    """The private key of the run with these public keys, from the environment or this user's state folder.

    None if neither holds it. Raises `ConfigError` for a text in the environment that is no key.
    """
    if text := environ.get(ENV_RUN_KEY):
        found = RunKey.parse(text)
        if found.signed_by == signed_by:
            return found
    try:
        kept = RunKey.parse(_path(signed_by, environ).read_text())
    except (OSError, ConfigError):
        return None
    return kept if kept.signed_by == signed_by else None


def signer_of(signed_by: SignedBy, run_sha256: Sha256, environ: Mapping[str, str]) -> Signer | None:
    """The private keys with which this process signs what it writes to the run: its attempt's, else the run's.

    None if it has neither, and so can only read. Raises `ConfigError` for an attempt's key that is damaged or of
    another run.
    """
    if text := environ.get(ENV_ATTEMPT_KEY):
        return Signer.of_secret(text, signed_by, run_sha256)
    key = run_key_of(signed_by, environ)
    return None if key is None else key.signer


def needs_key(url: str, signed_by: SignedBy, what: str) -> ConfigError:
    """Error for an action, named `what`, that needs the private key of the run at `url`, which this process lacks."""
    return ConfigError(
        f"{what} needs the private key of {url}, which is signed by {signed_by.key}. It is in the state folder of who "
        f"launched the run: `diloco key --export {url}` prints it there; here, put it into {ENV_RUN_KEY}."
    )


def _path(signed_by: SignedBy, environ: Mapping[str, str]) -> Path:
    return state_folder(environ, "keys") / signed_by.key.replace(":", "-")
