"""Looks up the digest that a registry has for the tag of a container image, by the OCI Distribution API.

A lookup is one HEAD of the manifest, with the token that the registry asks for. A multi-platform image has the digest
of its index, so that each machine gets the image of its own platform. Only `diloco lock` uses this; nothing is
downloaded.
"""

import base64
import hashlib
import ipaddress
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urljoin, urlsplit

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.executors.answers import answer_within
from diloco_orchestrator.executors.contract import Unavailable
from diloco_orchestrator.protocol.records import DIGEST_FORM, NAME_FORM

_MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_MOST_BYTES = 4 * 2**20  # of a manifest; registries need not take larger ones (distribution-spec, "Pushing Manifests")
_MOST_REDIRECTS = 3
_SILENCE_S = 20.0  # of one read from a connection
_PATH = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*", re.ASCII)
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?", re.ASCII)
_HUB, _HUB_API, _HUB_LOGIN = "docker.io", "registry-1.docker.io", "https://index.docker.io/v1/"
_PARAMETER = re.compile(r'([A-Za-z]+)\s*=\s*"([^"]*)"')


@dataclass(frozen=True)
class Reference:
    """The parts of a container image's name, by Docker's rules: `python` is docker.io/library/python:latest."""

    registry: str
    repository: str
    tag: str

    @classmethod
    def parse(cls, image: str) -> "Reference":
        """The parts of `image`. Raises `ConfigError` for an invalid name or one with a digest."""
        if "@" in image:
            raise ConfigError(f"image {image!r} names a digest itself, and no tag of it can move. Leave it out.")
        first, slash, rest = image.partition("/")
        has_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
        registry, path = (first, rest) if has_host else (_HUB, image)
        registry = _HUB if registry == "index.docker.io" else registry
        repository, colon, tag = path.partition(":")
        if registry == _HUB and "/" not in repository:
            repository = f"library/{repository}"
        tag = tag if colon else "latest"
        right = re.fullmatch(NAME_FORM, image) and _HOST.fullmatch(registry)
        if not (right and _PATH.fullmatch(repository) and _TAG.fullmatch(tag)):
            raise ConfigError(
                f"image {image[:200]!r} is no name of an image in a registry. Write it like python:3.11-slim or "
                "registry.example:5000/team/image:tag."
            )
        return cls(registry, repository, tag)

    @property
    def origin(self) -> str:
        """The scheme and host of the registry's API. The scheme is https, except for a registry on this machine."""
        host = _HUB_API if self.registry == _HUB else self.registry
        return f"{'http' if _is_loopback(host) else 'https'}://{host}"


def digests_of(images: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The registry's digest of each image, by image name. `environ`: names the folder of Docker's client."""
    folder = Path(environ["DOCKER_CONFIG"]) if environ.get("DOCKER_CONFIG") else Path.home() / ".docker"
    return {image: digest_of(image, docker_config=folder / "config.json") for image in sorted(set(images))}


def digest_of(image: str, *, docker_config: Path | None = None, limit_s: float = 60.0) -> str:
    """The digest ("sha256:…") that the registry has for an image's tag now.

    Args:
        image: name with a tag; without one it is "latest".
        docker_config: file in which `docker login` left credentials, used if the registry asks for some.
        limit_s: timeout in seconds.

    Raises `ConfigError` for a name that the registry does not have or show, refused credentials, and malformed replies;
    `Unavailable` for a registry that does not respond.
    """
    reference = Reference.parse(image)
    asked = _Lookup(image, reference, docker_config)
    try:
        return answer_within(limit_s, f"asking {reference.registry} for image {image}", asked.digest)
    except ConfigError:
        raise
    except (OSError, HTTPException, ValueError) as error:  # ValueError: of a URL that the registry named
        reason = getattr(error, "reason", None) or error
        raise Unavailable(
            f"registry {reference.registry} could not be asked for image {image}: {reason}. Is its name right, and "
            "does this machine reach it? Then try again."
        ) from None


@dataclass(frozen=True)
class _Reply:
    """An HTTP reply of a registry or of its token service."""

    url: str
    status: int
    headers: Message
    body: bytes = field(repr=False)


@dataclass(frozen=True)
class _Lookup:
    """One lookup of an image's digest at its registry.

    Credentials are sent to the registry's own host and its token service only.
    """

    image: str
    reference: Reference
    docker_config: Path | None

    def digest(self) -> str:
        url = f"{self.reference.origin}/v2/{self.reference.repository}/manifests/{self.reference.tag}"
        answer, authorization = self._manifest("HEAD", url, ""), ""
        if answer.status == 401 and _host(answer.url) == _host(url):
            authorization = self._authorization(answer.headers)
            answer = self._manifest("HEAD", url, authorization)
        self._check(answer)
        told = answer.headers.get("Docker-Content-Digest")
        if told is not None:
            return self._checked(told)
        answer = self._manifest("GET", url, authorization)
        self._check(answer)
        kind = answer.headers.get_content_type()
        if kind not in _MANIFESTS:
            raise self._error(f"answers with {kind[:100]!r}, which is no manifest of an image. Is it a registry?")
        return f"sha256:{hashlib.sha256(answer.body).hexdigest()}"

    def _checked(self, digest: str) -> str:
        if not re.fullmatch(DIGEST_FORM, digest):
            raise self._error(
                f"answers with the digest {digest[:100]!r}, which is no sha256 of 64 hex digits. Try again later, or "
                "name another registry."
            )
        return digest

    def _check(self, answer: _Reply) -> None:
        """Raise `ConfigError` or `Unavailable` for every HTTP status but 200."""
        if answer.status == 200:
            return
        if answer.status == 401 and _host(answer.url) != _host(self.reference.origin):
            raise self._error(
                f"redirects to {urlsplit(answer.url).netloc}, which asks for a login. Name that registry."
            )
        if answer.status in (401, 403):
            raise self._error(f"does not show it: it is private, or not there. {self._advice()}")
        if answer.status == 404:
            raise self._error("does not have it. Correct the name or the tag.")
        words = f"registry {self.reference.registry} answered {answer.status} for image {self.image}."
        if answer.status == 429:
            raise Unavailable(f"{words} It had too many requests from here: try again later, or `docker login` first.")
        raise Unavailable(f"{words} Try again later.")

    def _manifest(self, method: str, url: str, authorization: str) -> _Reply:
        """The registry's reply to a manifest request, after redirects; no credentials are sent to another host."""
        origin = _host(url)
        for _ in range(_MOST_REDIRECTS + 1):
            headers = {"Accept": ", ".join(_MANIFESTS)}
            if authorization and _host(url) == origin:
                headers["Authorization"] = authorization
            answer = _ask(method, url, headers)
            if answer.status not in (301, 302, 303, 307, 308):
                return answer
            to = urljoin(url, answer.headers.get("Location") or "")
            if urlsplit(to).scheme != "https" and _host(to) != origin:
                raise self._error(f"redirects to {to[:200]!r}, which is not https. Name the registry that has it.")
            url = to
        raise self._error(f"redirects more than {_MOST_REDIRECTS} times. Name the registry that has it.")

    # -- authorization -------------------------------------------------------------------------------------------

    def _authorization(self, headers: Message) -> str:
        """The Authorization header for a retry, as the registry's challenge in the reply's `headers` asks for."""
        challenges = [str(each) for each in headers.get_all("WWW-Authenticate") or []]
        bearer = next((each for each in challenges if each.lower().startswith("bearer ")), None)
        login = _login(self.reference, self.docker_config)
        if bearer is not None:
            return f"Bearer {self._token(dict(_PARAMETER.findall(bearer)), login)}"
        if login and any(each.lower().startswith("basic") for each in challenges):
            return f"Basic {login}"
        raise self._error(f"asks for credentials. {self._advice()}")

    def _token(self, challenge: Mapping[str, str], login: str) -> str:
        """A token of the registry's token service that permits reading this repository only, whatever the challenge
        asks for.

        `login`: user and password in base64; empty for an anonymous token.
        """
        realm = challenge.get("realm", "")
        at_home = _host(realm) == _host(self.reference.origin)
        if urlsplit(realm).scheme != "https" and not at_home:
            raise self._error(f"gives its tokens at {realm[:200]!r}, which is not https. Name another registry.")
        wanted = {"scope": f"repository:{self.reference.repository}:pull"}
        if "service" in challenge:
            wanted["service"] = challenge["service"]
        headers = {"Authorization": f"Basic {login}"} if login else {}
        separator = "&" if urlsplit(realm).query else "?"
        answer = _ask("GET", f"{realm}{separator}{urlencode(wanted)}", headers)
        if answer.status != 200:
            if answer.status in (400, 401, 403):
                raise self._error(f"gives no token to read it. {self._advice()}")
            raise Unavailable(
                f"registry {self.reference.registry} answered {answer.status} for a token to read image {self.image}. "
                "Try again later."
            )
        try:
            found = json.loads(answer.body)
            token = found.get("token") or found.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            token = None
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]{1,65536}", token):
            raise self._error("answers without a token where it gives tokens. Try again later.")
        return token

    def _advice(self) -> str:
        login = "docker login" if self.reference.registry == _HUB else f"docker login {self.reference.registry}"
        return (
            f"Correct the name; or `{login}`, whose credentials are used if they are in its config.json itself "
            "(auths), and not with a helper (credsStore). Else name the image by digest: image='NAME@sha256:…'."
        )

    def _error(self, words: str) -> ConfigError:
        return ConfigError(f"registry {self.reference.registry}, asked for image {self.image}, {words}")


def _login(reference: Reference, docker_config: Path | None) -> str:
    """User and password in base64 that `docker login` stored for the registry; empty if it stored none in the file."""
    if docker_config is None or not docker_config.is_file():
        return ""
    try:
        auths = json.loads(docker_config.read_bytes()).get("auths") or {}
        host = reference.registry
        known = [_HUB_LOGIN, host] if host == _HUB else [host, f"https://{host}", f"https://{host}/"]
        found: Any = next((auths[name] for name in known if name in auths), {})
        login = str(found.get("auth") or "")
        if login and b":" not in base64.b64decode(login, validate=True):
            raise ValueError
    except (OSError, ValueError, AttributeError, RecursionError):
        raise ConfigError(
            f"{docker_config} cannot be read: it is not what `docker login` writes. Correct it, or set DOCKER_CONFIG "
            "to another folder."
        ) from None
    return login


# -- one request ------------------------------------------------------------------------------------------------------


class _AsItCame(urllib.request.HTTPErrorProcessor):
    """Returns every HTTP reply: no redirect is followed, and no status raises."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


def _ask(method: str, url: str, headers: Mapping[str, str]) -> _Reply:
    own = _is_loopback(urlsplit(url).netloc)
    opener = urllib.request.build_opener(_AsItCame, *([urllib.request.ProxyHandler({})] if own else []))
    request = urllib.request.Request(url, method=method, headers=dict(headers))
    with opener.open(request, timeout=_SILENCE_S) as response:
        body = b"" if method == "HEAD" else response.read(_MOST_BYTES + 1)
        if len(body) > _MOST_BYTES:
            raise OSError(f"it answers with more than {_MOST_BYTES // 2**20} MiB")
        return _Reply(url, response.status, response.headers, body)


def _host(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _is_loopback(host: str) -> bool:
    """Whether a host, with or without port, is "localhost" or a loopback IP address. Names are not looked up in DNS."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
