"""The state of every random number generator of this process, as JSON.

Captured and restored around work that must not disturb training, and saved in manifests, so that a restarted attempt
draws the same numbers as its predecessor would have.
"""

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def seed_all(seed: int) -> None:
    """Seed torch, Python's `random`, and numpy if it is imported."""
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def capture(generator: torch.Generator | None = None) -> dict[str, Any]:
    """The state of torch (CPU and CUDA), `random`, numpy if it is imported, and `generator` if given, as JSON."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"random": [version, list(internal), gauss], "torch": _text(torch.get_rng_state())}
    if generator is not None:
        state["generator"] = _text(generator.get_state())
    if torch.cuda.is_available():
        state["cuda"] = [_text(each) for each in torch.cuda.get_rng_state_all()]
    if numpy := sys.modules.get("numpy"):
        name, words, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, words.tolist(), position, has_gauss, cached]
    return state


def restore(state: Mapping[str, Any], generator: torch.Generator | None = None) -> None:
    """Set all generators to a state that `capture` returned. Generators absent here or in the state stay unchanged."""
    version, internal, gauss = state["random"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    if generator is not None and "generator" in state:
        generator.set_state(_tensor(state["generator"]))
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_tensor(each) for each in state["cuda"]])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        name, words, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, words, position, has_gauss, cached))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
