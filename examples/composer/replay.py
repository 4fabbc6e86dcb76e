"""Asks teachers what they would have done in recorded states, within a budget.

Offline: no replica takes part. Teachers are served by an OpenAI-compatible API. Pairs are made of it by `pairs`.
"""

import asyncio
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import httpx

from composer.pairs import TeacherAction
from composer.pairs import extract_dpo_pairs as extract_dpo_pairs
from composer.traces import Message, TraceState, action_text

log = logging.getLogger(__name__)

_TRIES = 3
_LONGEST_PAUSE_S = 60.0
_TEMPLATE_TOKENS = 32  # that a server may add to each message, and once to the whole


@dataclass(frozen=True)
class Teacher:
    """A model behind an API. Its key is the environment variable `key_name`; without one no key is sent."""

    name: str
    base_url: str  # up to and with /v1
    model: str
    usd_per_mtok_in: float  # US dollars for a million tokens
    usd_per_mtok_out: float

    @property
    def key_name(self) -> str:
        return re.sub(r"\W", "_", self.name).upper() + "_API_KEY"

    def price_usd(self, tokens_in: int, tokens_out: int) -> Decimal:
        per_mtok = (Decimal(str(self.usd_per_mtok_in)), Decimal(str(self.usd_per_mtok_out)))
        return (per_mtok[0] * tokens_in + per_mtok[1] * tokens_out) / 1_000_000


class Replay(list[TeacherAction]):
    """The answers, by state and then by teacher; those that a teacher refused to give are left out."""

    def __init__(self, actions: Sequence[TeacherAction], spent_usd: float, stopped: str | None) -> None:
        super().__init__(actions)
        self.spent_usd = spent_usd
        self.stopped = stopped  # "budget" if calls were left out for it


class TeacherFailed(RuntimeError):
    """A teacher's API refused a request in a way that repeating it does not change."""

    answered: Replay  # what the others had answered by then, and what was spent


class Budget:
    """US dollars that are reserved before a request and settled after it, so that they cannot be passed."""

    def __init__(self, limit_usd: float) -> None:
        if not limit_usd > 0:
            raise ValueError(f"max_total_usd={limit_usd!r} is not above 0.")
        self.limit, self.spent, self.reserved = Decimal(str(limit_usd)), Decimal(0), Decimal(0)
        self.exhausted = False
        self._settled = asyncio.Condition()

    async def reserve(self, usd: Decimal) -> bool:
        """Whether the amount is reserved. Waits for requests under way, which may give some of theirs back."""
        async with self._settled:
            await self._settled.wait_for(
                lambda: self.exhausted or self.spent + self.reserved + usd <= self.limit or not self.reserved
            )
            if self.exhausted or self.spent + self.reserved + usd > self.limit:
                self.exhausted = True
                self._settled.notify_all()
                return False
            self.reserved += usd
            return True

    async def settle(self, reserved: Decimal, charged: Decimal) -> None:
        async with self._settled:
            self.reserved -= reserved
            self.spent += charged
            self._settled.notify_all()


async def replay_trace(
    states: Sequence[TraceState],
    teachers: Sequence[Teacher],
    *,
    max_total_usd: float,
    concurrency: int = 8,
    timeout_s: float = 60,
    max_tokens: int = 512,
    tools: Sequence[Mapping[str, Any]] = (),
    pause: Callable[[float], Any] = asyncio.sleep,
) -> Replay:
    """Ask every teacher in every state, until all have answered or the next request could pass the budget.

    `tools`: what a teacher may call, as the API takes it; `collate.tools_of` makes it from traces. Without them no
    teacher can answer by a call as the student did.

    The most that a request can cost is reserved before it is sent: `max_tokens`, a prompt token for every byte. What
    the answer's `usage` leaves of it is given back; without `usage`, where the reply was lost, and for a 5xx that may
    come after the work was done, nothing is. Requests that are answered with 429 or 5xx are tried three times in all,
    after `Retry-After` or a growing pause.

    Raises `TeacherFailed` for any other refusal, and for a `usage` above what was reserved; it holds the answers of
    before.
    """
    _warn_of_circles(states, teachers)
    budget, gate = Budget(max_total_usd), asyncio.Semaphore(concurrency)
    tasks: list[asyncio.Task[TeacherAction | None]] = []
    async with httpx.AsyncClient(timeout=timeout_s) as client:

        async def asked(state: TraceState, teacher: Teacher) -> TeacherAction | None:
            async with gate:
                return await _ask(client, state, teacher, budget, max_tokens, tools, pause)

        try:
            async with asyncio.TaskGroup() as group:
                tasks += (group.create_task(asked(state, teacher)) for state in states for teacher in teachers)
        except* TeacherFailed as group_failed:
            failed = group_failed.exceptions[0]
            assert isinstance(failed, TeacherFailed)
            failed.answered = _replay(tasks, budget)
            raise failed from None
    return _replay(tasks, budget)


def _replay(tasks: Sequence["asyncio.Task[TeacherAction | None]"], budget: Budget) -> Replay:
    finished = (task for task in tasks if not task.cancelled() and task.exception() is None)
    actions = [action for task in finished if (action := task.result()) is not None]
    return Replay(actions, float(budget.spent), "budget" if budget.exhausted else None)


async def _ask(
    client: httpx.AsyncClient,
    state: TraceState,
    teacher: Teacher,
    budget: Budget,
    max_tokens: int,
    tools: Sequence[Mapping[str, Any]],
    pause: Callable[[float], Any],
) -> TeacherAction | None:
    prompt = {"messages": [_sent(each) for each in state.messages], **({"tools": list(tools)} if tools else {})}
    body = {"model": teacher.model, **prompt, "max_tokens": max_tokens}
    most_in = len(json.dumps(prompt).encode()) + _TEMPLATE_TOKENS * (len(state.messages) + len(tools) + 1)
    most = teacher.price_usd(most_in, max_tokens)
    key = os.environ.get(teacher.key_name)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for attempt in range(1, _TRIES + 1):
        if not await budget.reserve(most):
            return None
        charged = most  # unless it is known better: the server may have answered, and the reply may be lost
        try:
            reply = await client.post(f"{teacher.base_url}/chat/completions", json=body, headers=headers)
            if reply.status_code == 200:
                text, charged = _read(reply, teacher, most)
                return TeacherAction(state.id, teacher.name, text, float(charged))
            wait_s = _retry_after_s(reply)
            if reply.status_code < 500 or reply.status_code == 503:
                charged = Decimal(0)  # refused before any work
            if reply.status_code != 429 and reply.status_code < 500:
                raise TeacherFailed(
                    f"teacher {teacher.name} refused a request with {reply.status_code}: {reply.text[:200]!r}. "
                    f"Its key is read from {teacher.key_name}, its address is {teacher.base_url}."
                )
        except httpx.TransportError as error:
            wait_s = None
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                charged = Decimal(0)  # nothing was sent
            log.warning("teacher %s: %s, charged $%s", teacher.name, type(error).__name__, charged)
        finally:
            await budget.settle(most, charged)
        if attempt < _TRIES:
            await pause(min(_LONGEST_PAUSE_S, 2.0**attempt if wait_s is None else wait_s))
    log.warning("teacher %s answered none of %d requests for state %s", teacher.name, _TRIES, state.id[:8])
    return None


def _read(reply: httpx.Response, teacher: Teacher, most: Decimal) -> tuple[str, Decimal]:
    """The answer's text and price."""
    try:
        answer = reply.json()
        return action_text(_action_of(answer["choices"][0]["message"])), _price_of(answer, teacher, most)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise TeacherFailed(
            f"teacher {teacher.name} answers in another form than chat completions ({error!r}): {reply.text[:200]!r}. "
            f"Is {teacher.base_url} an OpenAI-compatible API?"
        ) from None


def _price_of(answer: Any, teacher: Teacher, most: Decimal) -> Decimal:
    usage = answer.get("usage")
    if not usage:
        return most
    price = teacher.price_usd(int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
    if price > most:
        raise TeacherFailed(
            f"teacher {teacher.name} counts {usage}: more tokens than bytes were sent and tokens asked for, so that no "
            "budget holds. Check its address, and the bill."
        )
    return price


def _sent(message: Message) -> Message:
    """A message as the API takes it: arguments of calls are text there."""
    sent: Message = {key: message[key] for key in ("role", "content", "tool_call_id") if key in message}
    if "tool_calls" in message:
        calls = [(each, json.dumps(each["function"]["arguments"])) for each in message["tool_calls"]]
        sent["tool_calls"] = [{**each, "function": {**each["function"], "arguments": text}} for each, text in calls]
    return sent


def _action_of(message: Message) -> Message:
    """An answer of the API as a message of ours."""
    action: Message = {"role": "assistant", "content": message.get("content") or ""}
    calls = [each["function"] for each in message.get("tool_calls") or []]
    if calls:
        action["tool_calls"] = [
            {"function": {"name": each["name"], "arguments": json.loads(each["arguments"] or "{}")}} for each in calls
        ]
    return action


def _retry_after_s(reply: httpx.Response) -> float | None:
    try:
        return max(0.0, float(reply.headers["Retry-After"]))
    except (KeyError, ValueError):
        return None


def _warn_of_circles(states: Sequence[TraceState], teachers: Sequence[Teacher]) -> None:
    """Log which teachers are of the family that produced the traces: they agree with themselves."""
    families = {re.split(r"[-_/.:\d]", state.model.lower())[0] for state in states} - {""}
    for teacher in teachers:
        words = set(re.split(r"\W|_", f"{teacher.name} {teacher.model}".lower()))
        for family in sorted(families & words):
            log.warning(
                "teacher %s is of the family %s, which produced the trace: its agreement with the student says little. "
                "Take teachers of other families.",
                teacher.name,
                family,
            )
