"""The state of every random number generator of this process, as a small JSON object.

It is captured and restored around work that must not disturb training, and saved in manifests, so that a restarted
attempt draws the same numbers as its predecessor would have. A state is stored compressed, as its difference from the
state of a seed: a generator that has drawn at most about 600 numbers takes a few bytes, any other one 3.4 KiB.
"""

import base64
import random
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from diloco_orchestrator.errors import RecordInvalid

# A generator's states right after seeding and after the first draw, which replaces all 624 words of a Mersenne twister
# at once. The next 623 draws only move the position.
_Fresh = tuple[bytes, bytes]
_CRC_BYTES = 4
PARTS = ("base_dataloader", "sampler", "batch_sampler", "dataset")  # of a loader, where generators may be
_WORD_BYTES = 8  # of a word in torch's state, of which a Mersenne twister uses the lower half


def seed_all(seed: int) -> None:
    """Seed torch, Python's `random`, and numpy if it is imported."""
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


class Generators:
    """The states of all random generators of the process at one time, in memory."""

    def __init__(self) -> None:
        self._python, self._cpu, self._numpy = random.getstate(), torch.get_rng_state(), sys.modules.get("numpy")
        self._gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        self._mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        self._of_numpy = self._numpy.random.get_state() if self._numpy else None

    def restore(self) -> None:
        """Set all random generators of the process to the states in this object."""
        random.setstate(self._python)
        torch.set_rng_state(self._cpu)
        torch.cuda.set_rng_state_all(self._gpus)
        if self._mps is not None:
            torch.mps.set_rng_state(self._mps)
        if self._numpy:
            self._numpy.random.set_state(self._of_numpy)


@contextmanager
def kept() -> Iterator[None]:
    """Context that restores the states of all random generators of the process at its end."""
    states = Generators()
    try:
        yield
    finally:
        states.restore()


class SeparateDraws:
    """A separate sequence of random numbers, drawn inside `drawing`; training's generators are not affected."""

    def __init__(self) -> None:
        self._states: Generators | None = None
        self._is_drawing = False

    def begin(self, seed: Callable[[], None]) -> None:
        """Begin a new sequence, with the states that `seed` sets."""
        with kept():
            seed()
            self._states = Generators()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Context in which the process's generators draw from this sequence. May be nested."""
        if self._is_drawing:
            yield
            return
        assert self._states is not None, "begin comes first"
        with kept():
            self._states.restore()
            self._is_drawing = True
            try:
                yield
            finally:
                self._is_drawing = False
                self._states = Generators()


def capture(generator: torch.Generator | None = None) -> dict[str, Any]:
    """The state of torch (CPU, CUDA and MPS), `random`, numpy if it is imported, and `generator` if given, as JSON."""
    seed = torch.initial_seed()
    state: dict[str, Any] = {
        "seed": seed,
        "random": _packed(_python_bytes(random.getstate()), _fresh_python(seed)),
        "torch": _packed(_torch_bytes(torch.get_rng_state()), _fresh_torch(seed)),
    }
    if generator is not None:
        state["generator_seed"] = generator.initial_seed()
        state["generator"] = _packed(_torch_bytes(generator.get_state()), _fresh_torch(generator.initial_seed()))
    if torch.cuda.is_available():
        state["cuda"] = [_text(each.numpy().tobytes()) for each in torch.cuda.get_rng_state_all()]
    if torch.backends.mps.is_available():
        state["mps"] = _text(torch.mps.get_rng_state().cpu().numpy().tobytes())
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = _packed(_numpy_bytes(numpy.random.get_state()), _fresh_numpy(seed))
    return state


def restore(state: Mapping[str, Any], generator: torch.Generator | None = None) -> None:
    """Set all generators to a result of `capture`. Generators absent here or in the state stay unchanged.

    Raises `RecordInvalid` if a library's states have another form here than where the state was captured.
    """
    seed = state["seed"]
    random.setstate(_python_state(_unpacked(state["random"], _fresh_python(seed), "random")))
    torch.set_rng_state(_torch_state(_unpacked(state["torch"], _fresh_torch(seed), "torch")))
    if generator is not None and "generator" in state:
        fresh = _fresh_torch(state["generator_seed"])
        generator.set_state(_torch_state(_unpacked(state["generator"], fresh, "torch")))
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_tensor(base64.b64decode(each)) for each in state["cuda"]])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(_tensor(base64.b64decode(state["mps"])))
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(_numpy_state(_unpacked(state["numpy"], _fresh_numpy(seed), "numpy")))


def capture_generator(generator: torch.Generator) -> dict[str, Any]:
    """The state of one generator, such as a sampler's own, as JSON."""
    seed, data = generator.initial_seed(), _torch_bytes(generator.get_state())
    if generator.device.type != "cpu":
        return {"bytes": _text(data)}
    return {"seed": seed, "state": _packed(data, _fresh_torch(seed))}


def restore_generator(state: Mapping[str, Any], generator: torch.Generator) -> None:
    """Set a generator to a result of `capture_generator`. Raises `RecordInvalid` for a state of another form."""
    if "bytes" in state:
        generator.set_state(_torch_state(base64.b64decode(state["bytes"])))
    else:
        generator.set_state(_torch_state(_unpacked(state["state"], _fresh_torch(state["seed"]), "torch")))


def generators_in(loader: Any, depth: int = 4) -> list[torch.Generator]:
    """The random generators of a loader, its samplers and its dataset, each once, in a fixed order."""
    found: list[torch.Generator] = []
    own = getattr(loader, "generator", None)
    if isinstance(own, torch.Generator):
        found.append(own)
    for name in PARTS if depth else ():
        part = getattr(loader, name, None)
        if part is not None and not isinstance(part, str):
            found += [each for each in generators_in(part, depth - 1) if all(each is not other for other in found)]
    return found


# -- states of the libraries as bytes ---------------------------------------------------------------------------------

_PYTHON = struct.Struct("<I625I?d")  # version; words and position; whether a normal number is kept, and which
_NUMPY = struct.Struct("<2496sIId")  # words; position; whether a normal number is kept, and which
_cached = lru_cache(maxsize=8)  # for states that follow from a seed, and for unused generators


def _python_bytes(state: tuple[Any, ...]) -> bytes:
    version, internal, normal = state
    return _PYTHON.pack(version, *internal, normal is not None, normal or 0.0)


def _python_state(data: bytes) -> tuple[Any, ...]:
    version, *internal, kept, normal = _PYTHON.unpack(data)
    return version, tuple(internal), normal if kept else None


@_cached
def _fresh_python(seed: int) -> _Fresh:
    fresh, drawn = random.Random(seed), random.Random(seed)
    drawn.random()
    return _python_bytes(fresh.getstate()), _python_bytes(drawn.getstate())


def _numpy_bytes(state: Any) -> bytes:
    _, words, position, kept, normal = state
    return _NUMPY.pack(words.astype("<u4").tobytes(), position, kept, normal)


def _numpy_state(data: bytes) -> tuple[Any, ...]:
    words, position, kept, normal = _NUMPY.unpack(data)
    return "MT19937", sys.modules["numpy"].frombuffer(words, "<u4"), position, kept, normal


@_cached
def _fresh_numpy(seed: int) -> _Fresh:
    fresh, drawn = (sys.modules["numpy"].random.RandomState(seed % 2**32) for _ in range(2))
    drawn.random_sample()
    return _numpy_bytes(fresh.get_state()), _numpy_bytes(drawn.get_state())


def _torch_bytes(state: torch.Tensor) -> bytes:
    """The state with the lowest bytes of all words first, so that the unused upper halves are one run of zeros."""
    data = state.numpy().tobytes()
    return b"".join(data[place::_WORD_BYTES] for place in range(_WORD_BYTES))


def _torch_state(data: bytes) -> torch.Tensor:
    words = len(data) // _WORD_BYTES
    return _tensor(b"".join(data[word::words] for word in range(words)))


@_cached
def _fresh_torch(seed: int) -> _Fresh:
    fresh, drawn = (torch.Generator("cpu").manual_seed(seed) for _ in range(2))
    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=drawn)
    return _torch_bytes(fresh.get_state()), _torch_bytes(drawn.get_state())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# -- differences ------------------------------------------------------------------------------------------------------


@_cached
def _packed(state: bytes, fresh: _Fresh) -> str:
    """A generator's state as text: its checksum, and the smaller of its compressed differences from those in `fresh`.

    `fresh`: the generator's states right after seeding and after one draw.
    """
    differences = [bytes([index]) + zlib.compress(_difference(state, each), 9) for index, each in enumerate(fresh)]
    return _text(zlib.crc32(state).to_bytes(_CRC_BYTES, "little") + min(differences, key=len))


def _unpacked(text: str, fresh: _Fresh, library: str) -> bytes:
    """The generator's state that `_packed` encoded in `text`, as bytes.

    `fresh`: the generator's states right after seeding and after one draw; `text` holds the difference from one of
    them. `library`: the generator's name in errors. Raises `RecordInvalid` if `text` cannot be decoded or the checksum
    of the result differs, as with another version of the library.
    """
    try:
        data = base64.b64decode(text)
        reference = fresh[data[_CRC_BYTES]]
        difference = zlib.decompress(data[_CRC_BYTES + 1 :])
    except (ValueError, IndexError, zlib.error) as error:
        raise RecordInvalid(f"the saved random state of {library} cannot be decoded: {error}.") from None
    state = _difference(difference, reference) if len(difference) == len(reference) else b""
    if zlib.crc32(state) != int.from_bytes(data[:_CRC_BYTES], "little"):
        raise RecordInvalid(
            f"the saved random state of {library} has another form than the states of the version installed here. "
            "Resume with the versions in the claim (`claim.<token>.json`) of the attempt that saved it."
        )
    return state


def _difference(one: bytes, other: bytes) -> bytes:
    """The bytewise exclusive or of two byte strings of equal length."""
    return (int.from_bytes(one, "little") ^ int.from_bytes(other, "little")).to_bytes(len(one), "little")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
