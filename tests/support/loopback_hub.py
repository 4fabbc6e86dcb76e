"""The Hugging Face Hub's repositories of models on 127.0.0.1, for the genuine huggingface_hub: git LFS, commits, tags.

Does NOT prove how the real service behaves: which files it wants as LFS (here safetensors), how large a request may be,
what it finds wrong with a model card, its rate limits; nor the Xet protocol, which clients prefer where hf_xet is
installed (`HF_HUB_DISABLE_XET=1` here).
"""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    private: bool
    commits: list[tuple[str, str, dict[str, bytes]]] = field(default_factory=list)  # (id, message, files), oldest first
    tags: dict[str, str] = field(default_factory=dict)  # name -> commit

    def __post_init__(self) -> None:
        self.add("initial commit", {})

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1][2]

    def add(self, message: str, files: dict[str, bytes]) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits.append((oid, message, files))
        return oid

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        oid = self.commits[-1][0] if revision == "main" else self.tags.get(revision, revision)
        return next(((each, files) for each, _, files in self.commits if each == oid), None)


class LoopbackHub:
    """The service. `failing`: the HTTP status with which commits are answered; 0: none fails."""

    def __init__(self, token: str = "hf_loopback_77aa31") -> None:
        self.token, self.user = token, "ada"
        self.failing = 0
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}  # LFS objects by sha256
        self.requests: list[tuple[str, str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.environ = {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": self.token, "HF_HUB_DISABLE_XET": "1"}

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._route(None)

    def do_HEAD(self) -> None:
        self._route(None)

    def do_POST(self) -> None:
        self._route(self._body())

    def do_PUT(self) -> None:
        self._route(self._body())

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _route(self, body: bytes | None) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        if parts[0] == "lfs":  # the address that the batch reply gave, which takes no token
            hub.blobs[parts[1]] = body or b""
            return self._answer(200, {})
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._answer(401, {"error": "Invalid username or password."})
        match self.command, parts:
            case "POST", ["api", "repos", "create"]:
                self._create(json.loads(body or b"{}"))
            case "POST", ["api", "validate-yaml"]:
                self._answer(200, {"errors": [], "warnings": []})
            case _, ["api", "models", user, name, *rest]:
                repository = hub.repositories.get(f"{user}/{name}")
                if repository is None:
                    self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
                else:
                    self._of_repository(f"{user}/{name}", repository, rest, body)
            case "POST", [user, name, "info", "lfs", "objects", "batch"] if name.endswith(".git"):
                self._batch(json.loads(body or b"{}"))
            case _, [user, name, "resolve", revision, *file]:
                self._resolve(f"{user}/{name}", revision, "/".join(file))
            case _:
                self._answer(404, {"error": f"{self.command} {path} is not there"})

    def _create(self, wanted: dict[str, Any]) -> None:
        hub, name = self.hub, f"{wanted.get('organization') or self.hub.user}/{wanted['name']}"
        if not name.startswith(f"{hub.user}/"):
            return self._answer(
                403, {"error": f"You don't have the rights to create a model under the namespace {name}"}
            )
        if name in hub.repositories:
            return self._answer(409, {"error": "You already created this model repo", "url": f"{hub.endpoint}/{name}"})
        hub.repositories[name] = Repository(private=wanted.get("visibility") == "private")
        self._answer(200, {"url": f"{hub.endpoint}/{name}", "name": name})

    def _of_repository(self, name: str, repository: Repository, rest: list[str], body: bytes | None) -> None:
        match self.command, rest:
            case "GET", [] | ["revision", _]:
                found = repository.at(rest[1] if rest else "main")
                if found is None:
                    return self._answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
                siblings = [{"rfilename": each} for each in sorted(found[1])]
                self._answer(
                    200, {"id": name, "sha": found[0], "private": repository.private, "siblings": siblings, "tags": []}
                )
            case "GET", ["tree", revision, *_]:
                found = repository.at(revision)
                files = found[1] if found else {}
                self._answer(
                    200,
                    [
                        {"type": "file", "path": each, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for each, data in sorted(files.items())
                    ],
                )
            case "GET", ["refs"]:
                tags = [
                    {"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": oid}
                    for tag, oid in repository.tags.items()
                ]
                main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repository.commits[-1][0]}
                self._answer(200, {"branches": [main], "converts": [], "tags": tags})
            case "POST", ["preupload", _]:
                self._answer(
                    200,
                    {
                        "files": [
                            {
                                "path": each["path"],
                                "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                                "shouldIgnore": False,
                            }
                            for each in json.loads(body or b"")["files"]
                        ]
                    },
                )
            case "POST", ["commit", "main"]:
                self._commit(name, repository, body or b"")
            case "POST", ["tag", revision]:
                wanted = json.loads(body or b"")["tag"]
                if wanted in repository.tags:
                    return self._answer(409, {"error": "Tag reference exists already"})
                repository.tags[wanted] = revision
                self._answer(200, {})
            case _:
                self._answer(404, {"error": f"{self.command} {rest} is not there"})

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{each['oid']}"}}}
            for each in wanted["objects"]
        ]
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repository: Repository, body: bytes) -> None:
        hub = self.hub
        if hub.failing:
            # As a proxy on the way may do, with what it should not repeat.
            return self._answer(hub.failing, {"error": f"refused the request with Authorization: Bearer {hub.token}"})
        files, message = dict(repository.files), ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            match line["key"]:
                case "header":
                    message = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    data = hub.blobs[value["oid"]]
                    assert hashlib.sha256(data).hexdigest() == value["oid"] and len(data) == value["size"]
                    files[value["path"]] = data
                case "deletedFile":
                    del files[value["path"]]
        oid = repository.add(message, files)
        self._answer(
            200,
            {"success": True, "commitOid": oid, "commitUrl": f"{hub.endpoint}/{name}/commit/{oid}", "hookOutput": ""},
        )

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository = self.hub.repositories.get(name)
        found = repository.at(revision) if repository else None
        if found is None or file not in found[1]:
            return self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        data = found[1][file]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": found[0]}
        self._send(200, data, headers, "application/octet-stream")

    def _answer(self, code: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self._send(code, json.dumps(body).encode(), headers or {}, "application/json")

    def _send(self, code: int, data: bytes, headers: dict[str, str], kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
