"""Modal's API on loopback, as far as Sandboxes need it: the genuine SDK talks to it, commands run as local processes.

Proves that our calls are ones the SDK takes, and what we make of its answers. Proves nothing about Modal itself: its
scheduling, how it reports a preemption, whether its name lookup sees ended Sandboxes of every kind, whether a tag can
be set and read after the end, how long output takes to arrive and how long it is kept, limits on sizes and rates, or
whether SIGTERM comes before SIGKILL. Images, GPUs, regions and OIDC tokens are recorded and otherwise ignored.
"""

import asyncio
import base64
import codecs
import json
import math
import os
import random
import re
import string
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from unittest import mock

import grpclib.server
from google.protobuf import empty_pb2
from grpclib import GRPCError, Status
from grpclib.encoding.proto import ProtoCodec
from machines import Machine
from modal._utils.grpc_utils import custom_detail_codec
from modal_proto import api_pb2
from modal_proto.api_grpc import ModalClientBase

STATUS = api_pb2.GenericResult
_GRACE_S = 2.0
_LETTERS = string.digits + string.ascii_letters


@dataclass
class Sandbox:
    sandbox_id: str
    app_id: str
    definition: api_pb2.Sandbox
    env: dict[str, str]
    tags: dict[str, str]
    created_at: float
    machine: Machine | None = None  # None: it waits for one
    terminated: bool = False
    result: int | None = None  # told instead of what became of the machine
    words: str = ""  # Modal's about that result
    entries: list[api_pb2.TaskLogs] = field(default_factory=list)
    read_bytes: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=codecs.getincrementaldecoder("utf-8"))

    def start(self) -> None:
        if self.machine is None:
            command = list(self.definition.entrypoint_args)
            self.machine = Machine(command, self.env, self.definition.timeout_secs, _GRACE_S)

    def outcome(self) -> api_pb2.GenericResult:
        if self.result is not None:
            return STATUS(status=self.result, exception=self.words)
        if self.machine is None or self.machine.exit_code is None:
            return STATUS(status=STATUS.GENERIC_STATUS_TERMINATED) if self.terminated and not self.machine else STATUS()
        if self.machine.timed_out:
            return STATUS(status=STATUS.GENERIC_STATUS_TIMEOUT)
        if self.terminated:
            return STATUS(status=STATUS.GENERIC_STATUS_TERMINATED)
        code = self.machine.exit_code
        status = STATUS.GENERIC_STATUS_SUCCESS if code == 0 else STATUS.GENERIC_STATUS_FAILURE
        return STATUS(status=status, exitcode=code if code >= 0 else 128 - code)

    def ended(self) -> bool:
        return bool(self.outcome().status)

    def terminate(self) -> None:
        if not self.ended():
            self.terminated = True
            if self.machine is not None:
                self.machine.terminate()

    def logs(self) -> list[api_pb2.TaskLogs]:
        """Output so far as Python writes it, a line and its end apart, stamped with when the file last grew."""
        if self.machine is not None and self.machine.output.exists():
            stamp = self.machine.output.stat().st_mtime_ns
            data = self.machine.read(self.read_bytes)
            self.read_bytes += len(data)
            for piece in re.findall(r"[^\n]+|\n", self.decoder.decode(data)):
                source = api_pb2.FILE_DESCRIPTOR_STDOUT
                entry = api_pb2.TaskLogs(data=piece, timestamp_ns=stamp, timestamp=stamp / 1e9, file_descriptor=source)
                self.entries.append(entry)
        return self.entries


class LoopbackModal:
    """The server: a context manager that ends all its machines. Attributes and methods below make it misbehave."""

    def __init__(self) -> None:
        self.token_id, self.token_secret = "ak-loopback", "as-" + "".join(random.choices(_LETTERS, k=22))
        self.sandboxes: dict[str, Sandbox] = {}
        self.forgotten: list[Sandbox] = []
        self.requests: list[tuple[str, Any]] = []  # (RPC, message) of every call that was let in
        self.secrets: dict[str, dict[str, str]] = {}
        self.named_secrets: dict[str, dict[str, str]] = {}  # what a user made at Modal beforehand
        self.named_volumes: set[str] = set()
        self.gpus_without_room: set[str] = set()
        self.refused: set[str] = set()  # parts of names that may not be launched
        self.no_capacity = self.holding = False
        self.failing: Status | None = None  # with which everything is answered
        self.throttle_s: float | None = None  # everything is answered with this pause to make
        self.odd: bytes | None = None  # with which everything is answered as if it were the message
        self.hides: set[str] = set()  # names that exist and are not found yet
        self.repeats = False  # a listing names everything twice
        self.slow_s = 0.0
        self.page_size = 2  # of a listing; small, so that some pages are turned
        self._apps: dict[str, str] = {}
        self._clients: list[Any] = []

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        for client in self._clients:
            client.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        for sandbox in [*self.sandboxes.values(), *self.forgotten]:
            if sandbox.machine is not None:
                sandbox.machine.close()

    def _run(self, started: threading.Event) -> None:
        asyncio.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = grpclib.server.Server([_service(self)], codec=_Codec(), status_details_codec=custom_detail_codec)
        await server.start("127.0.0.1", 0)
        listening: Any = server._server
        self.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        started.set()
        await self._stop.wait()
        server.close()

    def environ(self) -> dict[str, str]:
        """What a user would export."""
        return {
            "MODAL_SERVER_URL": self.url,
            "MODAL_TOKEN_ID": self.token_id,
            "MODAL_TOKEN_SECRET": self.token_secret,
            "MODAL_CONFIG_PATH": "/nonexistent",
        }

    def client(self, token_secret: str | None = None) -> Any:
        """A `modal.Client` of its own: the one from the environment is kept for the whole process."""
        import modal

        with mock.patch.dict(os.environ, self.environ()):
            client = modal.Client.from_credentials(self.token_id, token_secret or self.token_secret)
        self._clients.append(client)
        return client

    # -- misbehaving ---------------------------------------------------------------------------------------------

    def preempt(self, sandbox_id: str) -> None:
        self.sandboxes[sandbox_id].terminate()

    def hold(self, on: bool) -> None:
        """While on, Sandboxes wait for a machine."""
        self.holding = on
        if not on:
            for sandbox in list(self.sandboxes.values()):
                sandbox.start()

    def forget(self, sandbox_id: str) -> None:
        sandbox = self.sandboxes.pop(sandbox_id)
        self.forgotten.append(sandbox)
        if sandbox.machine is not None:
            sandbox.machine.kill()

    def sandboxes_of(self, **tags: str) -> list[Sandbox]:
        everything = [*self.sandboxes.values(), *self.forgotten]
        return [each for each in everything if all(each.tags.get(name) == value for name, value in tags.items())]

    # -- replies, one method per RPC; those named ...V2 speak to the newer backend in the same words ---------------

    def AppGetOrCreate(self, request: Any) -> Any:  # noqa: N802
        app_id = self._apps.setdefault(f"{request.environment_name}/{request.app_name}", f"ap-{len(self._apps)}")
        metadata = api_pb2.AppHandleMetadata(app_id=app_id, environment_name=request.environment_name)
        return api_pb2.AppGetOrCreateResponse(app_id=app_id, handle_metadata=metadata)

    def EnvironmentGetOrCreate(self, request: Any) -> Any:  # noqa: N802
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-0", metadata=metadata)

    def ImageGetOrCreate(self, request: Any) -> Any:  # noqa: N802
        return api_pb2.ImageGetOrCreateResponse(
            image_id="im-0", result=STATUS(status=STATUS.GENERIC_STATUS_SUCCESS), metadata=api_pb2.ImageMetadata()
        )

    def SecretGetOrCreate(self, request: Any) -> Any:  # noqa: N802
        if request.deployment_name and request.deployment_name not in self.named_secrets:
            raise GRPCError(Status.NOT_FOUND, f"Secret '{request.deployment_name}' not found")
        secret_id = f"st-{len(self.secrets)}"
        given = self.named_secrets[request.deployment_name] if request.deployment_name else request.env_dict
        self.secrets[secret_id] = dict(given)
        return api_pb2.SecretGetOrCreateResponse(secret_id=secret_id)

    def VolumeGetOrCreate(self, request: Any) -> Any:  # noqa: N802
        name = request.deployment_name
        if name not in self.named_volumes:
            raise GRPCError(Status.NOT_FOUND, f"Volume '{name}' not found")
        volume_id = f"vo-{name}"
        metadata = api_pb2.VolumeMetadata(name=name)
        return api_pb2.VolumeGetOrCreateResponse(volume_id=volume_id, metadata=metadata)

    def AuthTokenGet(self, request: Any) -> Any:  # noqa: N802
        claims = base64.urlsafe_b64encode(json.dumps({"exp": int(time.time()) + 3600}).encode()).rstrip(b"=").decode()
        return api_pb2.AuthTokenGetResponse(token=f"e30.{claims}.e30")

    def SandboxCreate(self, request: Any) -> Any:  # noqa: N802
        env: dict[str, str] = {}
        for secret_id in request.definition.secret_ids:
            env |= self.secrets[secret_id]
        return api_pb2.SandboxCreateResponse(**self._create(request, env, "".join(random.choices(_LETTERS, k=22))))

    def SandboxCreateV2(self, request: Any) -> Any:  # noqa: N802
        env: dict[str, str] = {}
        for source in request.secret_sources:
            env |= self.secrets[source.secret_id] if source.secret_id else source.env.contents
        return api_pb2.SandboxCreateV2Response(**self._create(request, env, "".join(random.choices(_LETTERS, k=26))))

    def _create(self, request: Any, env: Mapping[str, str], tail: str) -> dict[str, Any]:
        name = request.definition.name
        if any(part in name for part in self.refused):
            raise GRPCError(Status.PERMISSION_DENIED, f"{name} may not be created here")
        if self.no_capacity or request.definition.resources.gpu_config.gpu_type in self.gpus_without_room:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "Insufficient capacity to create sandbox.")
        if any(each.definition.name == name and not each.ended() for each in self.sandboxes.values()):
            raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox with name '{name}' already exists")
        tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        sandbox = Sandbox(f"sb-{tail}", request.app_id, request.definition, dict(env), tags, time.time())
        self.sandboxes[sandbox.sandbox_id] = sandbox
        if not self.holding:
            sandbox.start()
        metadata = api_pb2.SandboxHandleMetadata(app_id=sandbox.app_id)
        return {"sandbox_id": sandbox.sandbox_id, "metadata": metadata}

    def SandboxGetTaskId(self, request: Any) -> Any:  # noqa: N802
        sandbox = self._sandbox(request.sandbox_id)
        if sandbox.machine is None:
            result = sandbox.outcome() if sandbox.ended() else None
            return api_pb2.SandboxGetTaskIdResponse(task_result=result)
        return api_pb2.SandboxGetTaskIdResponse(task_id=f"ta-{sandbox.sandbox_id}")

    def SandboxWait(self, request: Any) -> Any:  # noqa: N802
        sandbox = self._sandbox(request.sandbox_id)
        metadata = api_pb2.SandboxHandleMetadata(app_id=sandbox.app_id)
        return api_pb2.SandboxWaitResponse(result=sandbox.outcome(), metadata=metadata)

    def SandboxTerminate(self, request: Any) -> Any:  # noqa: N802
        self._sandbox(request.sandbox_id).terminate()
        return api_pb2.SandboxTerminateResponse()

    def SandboxTagsGet(self, request: Any) -> Any:  # noqa: N802
        return api_pb2.SandboxTagsGetResponse(tags=_tags(self._sandbox(request.sandbox_id).tags))

    def SandboxTagsSet(self, request: Any) -> Any:  # noqa: N802
        self._sandbox(request.sandbox_id).tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        return empty_pb2.Empty()

    def SandboxGetFromName(self, request: Any) -> Any:  # noqa: N802
        app_id = self._apps.get(f"{request.environment_name}/{request.app_name}")
        named = [
            each
            for each in self.sandboxes.values()
            if (each.app_id, each.definition.name) == (app_id, request.sandbox_name)
        ]
        live = [each for each in named if not each.ended()]
        found = live or (named if request.include_terminated else [])
        if not found or request.sandbox_name in self.hides:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox with name '{request.sandbox_name}' not found")
        metadata = api_pb2.SandboxHandleMetadata(app_id=app_id)
        return api_pb2.SandboxGetFromNameResponse(sandbox_id=found[-1].sandbox_id, metadata=metadata)

    def SandboxList(self, request: Any) -> Any:  # noqa: N802
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        page = [
            each
            for each in self.sandboxes.values()
            if each.app_id == request.app_id
            and wanted.items() <= each.tags.items()
            and (request.include_finished or not each.ended())
            and (not request.before_timestamp or each.created_at < request.before_timestamp)
        ]
        page = sorted(page, key=lambda each: each.created_at, reverse=True)[: self.page_size]
        infos = [
            api_pb2.SandboxInfo(
                id=each.sandbox_id,
                created_at=each.created_at,
                app_id=each.app_id,
                tags=_tags(each.tags),
                name=each.definition.name,
                task_info=api_pb2.TaskInfo(result=each.outcome()),
                metadata=api_pb2.SandboxHandleMetadata(app_id=each.app_id),
            )
            for each in page
        ]
        return api_pb2.SandboxListResponse(sandboxes=infos * 2 if self.repeats else infos)

    SandboxGetTaskIdV2, SandboxWaitV2, SandboxTerminateV2 = SandboxGetTaskId, SandboxWait, SandboxTerminate
    SandboxTagsGetV2, SandboxTagsSetV2 = SandboxTagsGet, SandboxTagsSet
    SandboxGetFromNameV2, SandboxListV2 = SandboxGetFromName, SandboxList

    def AppFetchLogs(self, request: Any) -> Any:  # noqa: N802
        entries = self._logs(request)[-request.limit :]
        batch = api_pb2.TaskLogsBatch(task_id=request.task_id, items=entries)
        return api_pb2.AppFetchLogsResponse(batches=[batch])

    def AppCountLogs(self, request: Any) -> Any:  # noqa: N802
        width, counts = request.bucket_secs, dict[int, int]()
        for number in range(request.since.seconds // request.bucket_secs, request.until.seconds // width + 1):
            counts[number] = 0
        for entry in self._logs(request):
            number = math.floor(entry.timestamp_ns / 1e9 / width)
            counts[number] = counts.get(number, 0) + 1
        response = api_pb2.AppCountLogsResponse(app_id=request.app_id)
        for number, count in sorted(counts.items()):
            bucket = response.buckets.add(stdout_logs=count)
            bucket.bucket_start_at.seconds = number * width
        return response

    def _logs(self, request: Any) -> list[api_pb2.TaskLogs]:
        since, until = request.since.ToNanoseconds(), request.until.ToNanoseconds()
        entries = self._sandbox(request.task_id.removeprefix("ta-")).logs()
        return [entry for entry in entries if since <= entry.timestamp_ns <= until]

    def _sandbox(self, sandbox_id: str) -> Sandbox:
        if sandbox_id not in self.sandboxes:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {sandbox_id} not found")
        return self.sandboxes[sandbox_id]


@dataclass(frozen=True)
class _Raw:
    """Bytes that are sent as they are."""

    data: bytes


class _Codec(ProtoCodec):
    def encode(self, message: Any, message_type: Any) -> bytes:
        return message.data if isinstance(message, _Raw) else super().encode(message, message_type)


def _tags(tags: Mapping[str, str]) -> list[api_pb2.SandboxTag]:
    return [api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()]


def _service(server: LoopbackModal) -> ModalClientBase:
    """The genuine service class; an RPC that the server has no method for fails with its name."""

    def handler(rpc: str) -> Callable[..., Any]:
        reply = getattr(server, rpc, None)

        async def handle(self: Any, stream: Any) -> None:
            request = await stream.recv_message()
            if (stream.metadata.get("x-modal-token-id"), stream.metadata.get("x-modal-token-secret")) != (
                server.token_id,
                server.token_secret,
            ):
                raise GRPCError(Status.UNAUTHENTICATED, "Token validation failed")
            server.requests.append((rpc, request))
            await asyncio.sleep(server.slow_s)
            if server.throttle_s is not None:
                pause = api_pb2.RPCRetryPolicy(retry_after_secs=server.throttle_s)
                raise GRPCError(Status.RESOURCE_EXHAUSTED, "Rate limit exceeded", [pause])
            if server.failing is not None:
                raise GRPCError(server.failing, "the service is down for a moment")
            if reply is None:
                raise GRPCError(Status.UNIMPLEMENTED, f"the loopback server has no {rpc}")
            await stream.send_message(reply(request) if server.odd is None else _Raw(server.odd))

        return handle

    rpcs = {rpc: handler(rpc) for rpc in ModalClientBase.__abstractmethods__}
    service: ModalClientBase = type("Service", (ModalClientBase,), rpcs)()
    return service
