"""Ends the wait for calls of SDKs that have no time limit of their own, such as over a connection that is half open."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from diloco_orchestrator.executors.contract import Unavailable

T = TypeVar("T")


def answer_within(limit_s: float, what: str, call: Callable[[], T]) -> T:
    """The result of `call`, which runs in a thread of its own; what it raises is raised here.

    Raises `Unavailable` after `limit_s` seconds without a result. The call cannot be ended: its thread stays until it
    returns, and does not keep the process alive. So a caller must be able to make the call again, whatever the first
    one did. `what`: the action, for the error.
    """
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((True, call()))
        except BaseException as error:
            answers.put((False, error))

    threading.Thread(target=run, daemon=True, name=f"call: {what}").start()
    try:
        returned, answer = answers.get(timeout=limit_s)
    except queue.Empty:
        raise Unavailable(f"{what}: no answer for {limit_s:g} s. The service may be down; try again.") from None
    if returned:
        result: T = answer
        return result
    try:
        raise answer
    finally:
        del answer  # the error's traceback holds this frame


def items_while(is_there: Callable[[], bool], silence_s: float, items: Iterable[T]) -> Iterator[T]:
    """The items of an iterable that may block for ever; they are read in a thread of its own.

    After every `silence_s` seconds without an item `is_there` is called. The items end when it returns False and the
    next `silence_s` bring none; what it raises is raised here.
    """
    found: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    abandoned = threading.Event()

    def run() -> None:
        try:
            for item in items:
                found.put(("item", item))
                if abandoned.is_set():
                    return
            found.put(("end", None))
        except BaseException as error:
            found.put(("error", error))

    threading.Thread(target=run, daemon=True, name="items of a stream").start()
    last_wait = False
    try:
        while True:
            try:
                kind, value = found.get(timeout=silence_s)
            except queue.Empty:
                if last_wait:
                    return
                last_wait = not is_there()
                continue
            if kind == "item":
                yield value
            elif kind == "error":
                raise value
            else:
                return
    finally:
        abandoned.set()
