"""An OpenAI-compatible API on loopback, which may fail by plan and keeps the books of what it would bill."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

Plan = Callable[[], str]  # the fate of the next request: "ok", "no usage", "lost", or a status code


class TeacherServer:
    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]], fate: Plan = lambda: "ok") -> None:
        self.answer, self.fate = answer, fate
        self.requests: list[dict[str, Any]] = []
        self.headers: list[bytes] = []
        self.billed_tokens: list[tuple[int, int]] = []

    def billed_usd(self, per_mtok_in: float, per_mtok_out: float) -> Decimal:
        prices = Decimal(str(per_mtok_in)), Decimal(str(per_mtok_out))
        return sum((prices[0] * a + prices[1] * b for a, b in self.billed_tokens), Decimal(0)) / 1_000_000

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                assert length is not None
                request = json.loads(await reader.readexactly(int(length[1])))
                self.headers.append(head)
                self.requests.append(request)
                reply = self._reply(request)
                if reply is None:
                    break
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def _reply(self, request: dict[str, Any]) -> bytes | None:
        fate = self.fate()
        if fate.isdigit():
            return f"HTTP/1.1 {fate} No\r\nRetry-After: 0\r\nContent-Length: 4\r\n\r\noops".encode()
        usage = {
            "prompt_tokens": len(json.dumps(request["messages"])) // 3,
            "completion_tokens": request["max_tokens"] - 1 - len(self.requests) % 7,
        }
        self.billed_tokens.append((usage["prompt_tokens"], usage["completion_tokens"]))
        if fate == "lost":
            return None
        body = {"choices": [{"message": {"role": "assistant", **self.answer(request)}}]}
        data = json.dumps(body if fate == "no usage" else {**body, "usage": usage}).encode()
        return f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
