"""The digest of a tag, asked of a registry on loopback: with tokens, with passwords, and of one that misbehaves."""

import base64
import json
import shutil
from pathlib import Path

import pytest
from loopback_registry import LoopbackRegistry, certificate_in

from diloco_orchestrator.code_archive.image_digests import Reference, digest_of, digests_of
from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.executors.contract import Unavailable


@pytest.fixture
def registry():
    with LoopbackRegistry() as found:
        yield found


def login(folder: Path, registry: LoopbackRegistry, user: str = "ada", password: str = "s3same") -> Path:
    """The file that `docker login` leaves."""
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    (path := folder / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
    return path


@pytest.mark.parametrize(
    ("image", "origin", "repository", "tag"),
    [
        ("python", "https://registry-1.docker.io", "library/python", "latest"),
        ("python:3.11-slim", "https://registry-1.docker.io", "library/python", "3.11-slim"),
        ("pytorch/pytorch:2.6", "https://registry-1.docker.io", "pytorch/pytorch", "2.6"),
        ("docker.io/python:3", "https://registry-1.docker.io", "library/python", "3"),
        ("index.docker.io/library/python:3", "https://registry-1.docker.io", "library/python", "3"),
        ("ghcr.io/org/team/image:v1", "https://ghcr.io", "org/team/image", "v1"),
        ("quay.io/org/image", "https://quay.io", "org/image", "latest"),
        ("registry.example:5000/image:1", "https://registry.example:5000", "image", "1"),
        ("localhost/image:1", "http://localhost", "image", "1"),
        ("localhost:5000/team/image", "http://localhost:5000", "team/image", "latest"),
        ("127.0.0.1:5000/image", "http://127.0.0.1:5000", "image", "latest"),
        ("127.0.0.1.example/image", "https://127.0.0.1.example", "image", "latest"),
    ],
)
def test_names_mean_what_docker_means_by_them(image: str, origin: str, repository: str, tag: str):
    found = Reference.parse(image)
    assert (found.origin, found.repository, found.tag) == (origin, repository, tag)


@pytest.mark.parametrize(
    "image",
    ["", "Python", "python:", "python:a b", "python:3\n", "https://ghcr.io/a/b", "a//b", "ghcr.io/", "a:b:c", "-x/y",
     "../x", "ghcr.io/a/../b", "user@ghcr.io/a/b", "x" * 500],
)  # fmt: skip
def test_what_is_no_name_is_refused_before_anything_is_asked(image: str):
    with pytest.raises(ConfigError, match=r"image .* (is no name|names a digest)"):
        Reference.parse(image)


def test_a_tag_has_the_digest_of_its_index_of_all_platforms(registry: LoopbackRegistry):
    index = registry.push("team/image", "1", "first")
    assert digest_of(f"{registry.host}/team/image:1") == index
    assert [each.method for each in registry.requests] == ["HEAD"]
    second = registry.push("team/image", "1", "second")
    assert digest_of(f"{registry.host}/team/image:1") == second != index


def test_a_registry_that_tells_no_digest_is_asked_for_the_manifest(registry: LoopbackRegistry):
    registry.tells_digest = False
    index = registry.push("team/image", "1", "first")
    assert digest_of(f"{registry.host}/team/image:1") == index
    assert [each.method for each in registry.requests] == ["HEAD", "GET"]


def test_a_token_is_asked_for_to_read_this_repository_only(registry: LoopbackRegistry):
    registry.access = "token"
    index = registry.push("team/image", "1", "first")
    assert digest_of(f"{registry.host}/team/image:1") == index
    _, token, again = registry.requests
    assert token.path == "/token?scope=repository%3Ateam%2Fimage%3Apull&service=loopback" and not token.authorization
    assert again.authorization == "Bearer t0ken.team/image"


@pytest.mark.parametrize("access", ["token", "basic"])
def test_a_private_image_is_shown_to_who_logged_in_with_docker(registry: LoopbackRegistry, access: str, tmp_path: Path):
    registry.access, registry.users = access, {"ada": "s3same"}
    index, image = registry.push("team/image", "1", "first"), f"{registry.host}/team/image:1"
    with pytest.raises(ConfigError, match=f"`docker login {registry.host}`, whose credentials are used"):
        digest_of(image, docker_config=tmp_path / "config.json")
    assert digest_of(image, docker_config=login(tmp_path, registry)) == index
    assert digests_of([image, image], {"DOCKER_CONFIG": str(tmp_path)}) == {image: index}
    with pytest.raises(ConfigError) as refused:
        digest_of(image, docker_config=login(tmp_path, registry, password="wrong-Pa55"))
    assert "wrong-Pa55" not in str(refused.value) and "docker login" in str(refused.value)


def test_credentials_of_a_helper_are_not_asked_for_and_a_broken_file_is_named(registry: LoopbackRegistry, tmp_path):
    registry.access, registry.users = "basic", {"ada": "s3same"}
    (config := tmp_path / "config.json").write_text(json.dumps({"auths": {registry.host: {}}, "credsStore": "desktop"}))
    with pytest.raises(ConfigError, match="not with a helper"):
        digest_of(f"{registry.host}/image:1", docker_config=config)
    for broken in ("[]", "{", json.dumps({"auths": {registry.host: {"auth": "no base64"}}})):
        config.write_text(broken)
        with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
            digest_of(f"{registry.host}/image:1", docker_config=config)


@pytest.mark.parametrize("digest", ["sha256:abc", "sha512:" + "0" * 128, "sha256:" + "0A" * 32, "latest", "x" * 300])
def test_what_is_no_digest_is_not_taken_for_one(registry: LoopbackRegistry, digest: str):
    registry.digest = digest
    registry.push("image", "1", "first")
    with pytest.raises(ConfigError, match="no sha256 of 64 hex digits"):
        digest_of(f"{registry.host}/image:1")


def test_redirects_are_followed_to_the_same_host_or_to_https_alone(registry: LoopbackRegistry):
    index, image = registry.push("other/image", "1", "first"), f"{registry.host}/image:1"
    registry.redirects = ["/v2/other/image/manifests/1"]
    assert digest_of(image) == index
    asked = len(registry.requests)
    for to in ("http://169.254.169.254/latest/meta-data", "ftp://a.example/x", "file:///etc/passwd", "//b.example/x"):
        registry.redirects = [to]
        with pytest.raises(ConfigError, match="is not https"):
            digest_of(image)
    assert len(registry.requests) == asked + 4  # nothing followed
    registry.redirects = ["/v2/other/image/manifests/1"] * 9
    with pytest.raises(ConfigError, match="more than 3 times"):
        digest_of(image)


def test_a_login_does_not_go_to_another_host(registry: LoopbackRegistry, tmp_path: Path):
    """Here two ports of this machine: another service on it is another host."""
    registry.access, registry.users = "token", {"ada": "s3same"}
    with LoopbackRegistry() as thief:
        registry.realm = f"http://{thief.host}/token"
        with pytest.raises(ConfigError, match=r"gives its tokens at .* which is not https"):
            digest_of(f"{registry.host}/image:1", docker_config=login(tmp_path, registry))
        assert thief.requests == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, to make a certificate")
def test_by_https_tokens_and_manifests_may_come_from_elsewhere_but_the_login_goes_to_the_tokens_alone(
    registry: LoopbackRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    certificate = certificate_in(tmp_path)
    registry.access, registry.users = "token", {"ada": "s3same"}
    with (
        LoopbackRegistry(users=registry.users, certificate=certificate) as tokens,
        LoopbackRegistry(certificate=certificate) as mirror,
    ):
        registry.realm = f"https://{tokens.host}/token"
        index, image = mirror.push("team/image", "1", "first"), f"{registry.host}/team/image:1"
        given = {"docker_config": login(tmp_path, registry)}
        with pytest.raises(Unavailable, match="certificate verify failed"):
            digest_of(image, **given)
        assert tokens.requests == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with pytest.raises(ConfigError, match="does not have it"):  # the tokens are taken
            digest_of(image, **given)
        assert [each.authorization[:6] for each in tokens.requests] == ["Basic "]
        registry.access, registry.redirects = "open", [f"https://{mirror.host}/v2/team/image/manifests/1"]
        assert digest_of(image, **given) == index
        registry.access, registry.redirects_after_login = "token", f"https://{mirror.host}/v2/team/image/manifests/1"
        assert digest_of(image, **given) == index
        assert [each.authorization for each in mirror.requests] == ["", ""]
        mirror.access, mirror.users = "basic", {"ada": "s3same"}
        with pytest.raises(ConfigError, match=f"redirects to {mirror.host}, which asks for a login"):
            digest_of(image, **given)
        assert [each.authorization for each in mirror.requests] == ["", "", ""]


@pytest.mark.parametrize(("token", "words"), [("two words", "without a token"), ("a\r\nX-Evil: 1", "without a token")])
def test_what_is_no_token_is_not_sent(registry: LoopbackRegistry, token: str, words: str):
    registry.access, registry.token = "token", token
    with pytest.raises(ConfigError, match=words):
        digest_of(f"{registry.host}/image:1")


@pytest.mark.parametrize(
    ("status", "error"), [(403, ConfigError), (404, ConfigError), (429, Unavailable), (503, Unavailable)]
)
def test_every_refusal_names_the_image_and_says_what_to_do(registry: LoopbackRegistry, status: int, error: type):
    registry.status = status
    with pytest.raises(error, match=rf"{registry.host}/image:1\b.*(Correct|again)"):
        digest_of(f"{registry.host}/image:1")


@pytest.mark.parametrize(("endless", "words"), [("fast", "more than 4 MiB"), ("silent", "no answer for 0.5 s")])
def test_an_answer_that_never_ends_is_given_up(registry: LoopbackRegistry, endless: str, words: str):
    registry.push("image", "1", "first")
    registry.tells_digest, registry.endless = False, endless
    with pytest.raises(Unavailable, match=words):
        digest_of(f"{registry.host}/image:1", limit_s=60.0 if endless == "fast" else 0.5)


def test_a_page_that_is_no_manifest_has_no_digest(registry: LoopbackRegistry):
    registry.tells_digest = False
    registry.push("image", "1", "first")
    for key, (_, data) in registry.blobs.items():
        registry.blobs[key] = "text/html", data
    with pytest.raises(ConfigError, match="'text/html', which is no manifest"):
        digest_of(f"{registry.host}/image:1")


def test_a_registry_that_is_not_there_is_named():
    with pytest.raises(Unavailable, match=r"registry 127\.0\.0\.1:9 could not be asked for image 127\.0\.0\.1:9/x"):
        digest_of("127.0.0.1:9/x:1")
