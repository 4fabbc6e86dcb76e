"""Finds the private keys of a signed run: in the environment, or in this user's state folder."""

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.executors.process_contract import KEY_VARIABLES
from diloco_orchestrator.protocol.digests import Sha256
from diloco_orchestrator.protocol.signatures import KEY_BYTES, SignedBy, from_text, to_text
from diloco_orchestrator.signing.identity import Identity
from diloco_orchestrator.signing.keys import RunKey, Signer

ENV_RUN_KEY, ENV_ATTEMPT_KEY = KEY_VARIABLES  # private keys of an operator or the run; of an attempt


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
        return _written(_path(key.signed_by, environ), key.text())  # the file's name is that of the public key
    except OSError as error:
        raise ConfigError(
            f"the key of the signed run cannot be kept: {error}. Make that folder yours alone, or set {ENV_RUN_KEY}."
        ) from None


def run_key_of(signed_by: SignedBy, environ: Mapping[str, str]) -> RunKey | None:
    """The private key of the run with these public keys, from the environment or this user's state folder.

    None if it is in neither.
    """
    texts = [environ.get(ENV_RUN_KEY, "")]
    with suppress(OSError):
        texts.append(_path(signed_by, environ).read_text())
    for text in texts:
        with suppress(ConfigError):
            if (found := RunKey.parse(text)).signed_by == signed_by:
                return found
    return None


def operator_of(signed_by: SignedBy, run_sha256: Sha256, epoch: int, environ: Mapping[str, str]) -> Signer | None:
    """The private keys of a launcher or coordinator of the run, from the environment or this user's state folder.

    `epoch`: number of the newest keys, one more than the run's rotations; who holds the run's own key has those of
    every epoch. None if neither place holds any of this run. Raises `ConfigError` for a text in the environment that is
    damaged.
    """
    if (key := run_key_of(signed_by, environ)) is not None:
        return key.operator(run_sha256, epoch)
    if text := environ.get(ENV_RUN_KEY):
        if text.startswith(RunKey.beginning):
            RunKey.parse(text)  # of another run, or damaged
            return None
        return Signer.parse(text, signed_by, run_sha256)
    return None


def identity(environ: Mapping[str, str], *, make: bool) -> Identity | None:
    """This user's identity (key pair) from the state folder; if there is none, a new one with `make`, else None.

    Raises `ConfigError` if it cannot be written or is damaged.
    """
    try:
        path = state_folder(environ, "keys") / "identity"
        if make:
            _written(path, to_text(os.urandom(KEY_BYTES)))
        return Identity(from_text(path.read_text().strip(), KEY_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"this user's identity cannot be read: {error}. Delete the file to make a new one.") from None


def _written(path: Path, text: str) -> Path:
    """Write a private file, unless it exists. It appears with its whole text, and once that is on the disk.

    Several processes may do so at once, of several machines with one home folder too.
    """
    draft = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            if not path.exists():
                draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def needs_key(url: str, signed_by: SignedBy, what: str) -> ConfigError:
    """Error for an action, named `what`, that needs private keys of the run at `url`, which this process lacks."""
    return ConfigError(
        f"{what} needs keys of {url}, which is signed by {signed_by.key}. They are in the state folder of who launched "
        f"the run: `diloco key {url} --export` prints them there, for {ENV_RUN_KEY} here; or have this user certified "
        f"there: `diloco key {url} --certify` with the line that `diloco key --me` prints here."
    )


def _path(signed_by: SignedBy, environ: Mapping[str, str]) -> Path:
    return state_folder(environ, "keys") / signed_by.key.replace(":", "-")
