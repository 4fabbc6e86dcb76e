"""`CODECS`, the table of encodings, and the operations on all of them: encode blocks, measure and decode ranges.

An encoded vector is a small header, then its groups of elements one after another, so that a range can be decoded by
itself. Golden bytes in `tests/protocol/test_codecs.py` pin the format. The header has format version, codec and element
count; digests are in the manifest. Where a codec leaves fine parameters to another one, the header also lists the
vector's spans, each in one of the two and encoded as if it were a vector by itself. torch is imported inside functions,
because the cost forecast needs only sizes and must start fast.
"""

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from diloco_orchestrator.codecs import means, plain, scaled, sparse
from diloco_orchestrator.codecs.plain import tensor_over
from diloco_orchestrator.errors import ConfigError, PayloadCorrupt, unknown_name

if TYPE_CHECKING:
    import torch

_HEADER = struct.Struct("<4sHHQ")  # magic, format version, codec number, element count
_COUNT = struct.Struct("<Q")  # of spans, and of the elements of each
_MOST_SPANS = 2**16  # that a reader follows
_MAGIC = b"DLCO"
_VERSION = 1
_PIECE = 128 * 1024  # elements that are checked at once
LARGEST_GROUP = 4096  # elements; blocks and shards of vectors are cut at multiples of it


Ranges: TypeAlias = Sequence[tuple[int, int]]  # [start, stop) of elements, ascending, apart from each other


@dataclass(frozen=True)
class Measure:
    """Number of non-finite elements and sum of squares of a tensor, from which its norm follows."""

    nonfinite: int = 0  # elements that are NaN or infinity
    squares: float = 0.0  # the sum of all squares, to about six digits; infinity unless all are finite

    def __add__(self, other: "Measure") -> "Measure":
        return Measure(self.nonfinite + other.nonfinite, self.squares + other.squares)

    @property
    def norm(self) -> float:
        """The Euclidean norm, rounded to four digits, because further ones depend on the CPU's order of sums."""
        return float(f"{math.sqrt(self.squares):.4g}")


@dataclass(frozen=True)
class Codec:
    """A named encoding of flat CPU fp32 tensors in groups of elements, whose bytes depend on no other group."""

    name: str
    number: int  # in the header; never reused
    group: int  # elements; it divides `LARGEST_GROUP`, and the last group of a vector may be shorter
    body_size: Callable[[int], int]  # bytes behind the header, by number of elements; of whole groups their sum
    pack: "Callable[[torch.Tensor], torch.Tensor]"  # (n,) float32 -> uint8 on its device, perhaps the same memory
    unpack: "Callable[[torch.Tensor, int], torch.Tensor]"  # uint8, n -> (n,) of a dtype that fp32 holds, likewise
    levels: int = 0  # steps from zero to a group's largest absolute value; 0: each number is rounded by itself
    # Error feedback: the share of what encoding lost that is added to the next vector; 0: the loss needs none.
    feedback: float = 0.0
    sparse: bool = False  # whether an element that was not sent decodes to 0
    fine: str = ""  # codec of embeddings, norms and heads (`fine_parameters`) in such a run; empty: this one
    # Where numba is installed: adds the values of uint8, times a weight, to (n,) float32. None: decode and add.
    add: "Callable[[torch.Tensor, float, torch.Tensor], None] | None" = None
    # uint8, n -> the sum of squares of the values, from the encoded form; None: decode and sum.
    squares: "Callable[[torch.Tensor, int], float | None]" = lambda body, numel: None

    def __post_init__(self) -> None:
        if LARGEST_GROUP % self.group:
            raise ValueError(f"groups of {self.group} do not fill {LARGEST_GROUP} elements.")

    def header(self, numel: int, fine: Ranges = ()) -> bytes:
        """The header of an encoded vector of `numel` elements.

        `fine`: ranges of elements that are encoded in another codec with more bits, such as embeddings and norms.
        """
        header = _HEADER.pack(_MAGIC, _VERSION, self.number, numel)
        if not self.fine:
            return header
        lengths = _lengths(numel, fine)
        return header + b"".join(map(_COUNT.pack, (len(lengths), *lengths)))

    def encoded_size(self, numel: int, fine: Ranges = ()) -> int:
        """The size in bytes of an encoded vector of `numel` elements, header included.

        `fine`: ranges of elements that are encoded in another codec with more bits.
        """
        spans = self.spans(numel, fine)
        return len(self.header(numel, fine)) + sum(span.codec.body_size(span.stop - span.start) for span in spans)

    def most_size(self, numel: int) -> int:
        """The most bytes that any encoded vector of `numel` elements has, header included, whatever its fine ranges."""
        if not self.fine:
            return self.encoded_size(numel)
        count, turns = min(numel + 1, _MOST_SPANS), (self, get_codec(self.fine))
        # A span has as many groups as its elements fill, and one that it begins.
        full = max(-(-numel * each.body_size(each.group) // each.group) for each in turns)
        begun = count * max(each.body_size(1) for each in turns)
        return _HEADER.size + _COUNT.size * (1 + count) + full + begun

    def spans(self, numel: int, fine: Ranges = ()) -> "list[Span]":
        """The spans (ranges in one codec each) of a vector of `numel` elements, without empty ones, in order."""
        return _spans(self, _lengths(numel, fine if self.fine else ()))

    def encode_block(self, values: "torch.Tensor") -> "EncodedBlock":
        """Encode elements of a vector, (n,) float32 on the CPU: whole groups, except at the end of the vector."""
        return EncodedBlock(self, self.pack(values), values.numel())

    def measured(self, body: "torch.Tensor", numel: int) -> Measure:
        """Norm and number of non-finite values of `numel` encoded elements, whole groups except at the end."""
        import torch

        squares = self.squares(body, numel)
        return _measured(self.unpack(body, numel).to(torch.float32)) if squares is None else Measure(0, squares)


@dataclass(frozen=True)
class EncodedBlock:
    """A block of `numel` elements of a vector in encoded form."""

    codec: Codec
    body: "torch.Tensor"  # uint8; may share memory with the tensor that was encoded
    numel: int

    @property
    def data(self) -> memoryview:
        """The encoded bytes, which share the memory of `body`."""
        return self.body.numpy().data

    @property
    def values(self) -> "torch.Tensor":
        """(n,) float32, decoded; they may share the memory of `body`, and must not be written to."""
        import torch

        return self.codec.unpack(self.body, self.numel).to(torch.float32)

    @property
    def measure(self) -> Measure:
        """Norm and finiteness of the values."""
        return self.codec.measured(self.body, self.numel)


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a vector, encoded in one codec. `place`: offset of their bytes behind the header."""

    codec: Codec
    start: int
    stop: int
    place: int


def _lengths(numel: int, fine: Ranges) -> list[int]:
    """Numbers of elements, alternately outside and inside of the ranges `fine`, from the vector's beginning on."""
    ends = [end for each in fine for end in each]
    ends += [numel] if not ends or ends[-1] < numel else []
    return [stop - start for start, stop in zip([0, *ends], ends, strict=False)]


def _spans(codec: Codec, lengths: Sequence[int]) -> list[Span]:
    """The spans of a vector: its ranges in one codec each.

    `lengths`: their numbers of elements, alternately in `codec` and in the codec for parameters that need more bits.
    """
    turns = (codec, get_codec(codec.fine or codec.name))
    found, start, place = list[Span](), 0, 0
    for index, length in enumerate(lengths):
        span = Span(turns[index % 2], start, start + length, place)
        found += [span] if length else []
        start, place = span.stop, place + span.codec.body_size(length)
    return found


CODECS = {
    codec.name: codec
    for codec in (
        Codec("fp32", 1, 1, lambda n: 4 * n, plain.pack_fp32, plain.unpack_fp32),
        Codec("bf16", 2, 1, lambda n: 2 * n, plain.pack_bf16, plain.unpack_bf16),
        Codec(
            "int8",
            3,
            scaled.GROUP,
            scaled.size_int8,
            scaled.pack_int8,
            scaled.unpack_int8,
            127,
            add=scaled.add_int8,
            squares=scaled.squares_int8,
        ),
        Codec(
            "int4",
            4,
            scaled.GROUP,
            scaled.size_int4,
            scaled.pack_int4,
            scaled.unpack_int4,
            7,
            add=scaled.add_int4,
            squares=scaled.squares_int4,
        ),
        Codec(
            "2bit", 5, means.GROUP, means.size_2bit, means.pack_2bit, means.unpack_2bit, 1, feedback=0.9, fine="int8"
        ),
        *(
            Codec(
                f"topk{kept}",
                number,
                sparse.CHUNK,
                partial(sparse.size_topk, kept),
                partial(sparse.pack_topk, kept),
                partial(sparse.unpack_topk, kept),
                1,
                feedback=0.95,
                sparse=True,
                fine="int8",
            )
            for number, kept in ((6, 64), (7, 128))
        ),
    )
}


def get_codec(name: str) -> Codec:
    """The codec of this name. Raises `ConfigError` with the nearest known name for an unknown one."""
    if name not in CODECS:
        raise ConfigError(unknown_name("codec", name, CODECS))
    return CODECS[name]


def encode(values: "torch.Tensor", codec: str, fine: Ranges = ()) -> bytes:
    """Encode `values`, (numel,) float32 on the CPU, as header and body. Raises `ConfigError` for an unknown codec.

    `fine`: ranges of elements that are encoded with more bits, such as embeddings, if `codec` has another one for them.
    """
    found, flat = get_codec(codec), values.contiguous()
    spans = found.spans(values.numel(), fine)
    bodies = (bytes(span.codec.encode_block(flat[span.start : span.stop]).data) for span in spans)
    return found.header(values.numel(), fine) + b"".join(bodies)


class Encoded:
    """A flat vector in encoded form, whose elements are decoded on demand.

    Raises `PayloadCorrupt` unless header and length of `data` are those of `numel` elements of this codec. Decoding
    raises `PayloadCorrupt` for a body that the codec's encoder cannot have written.
    """

    def __init__(self, data: bytes | memoryview, codec: str, numel: int) -> None:
        self.numel = numel
        self._codec = get_codec(codec)
        self._data = memoryview(data)
        try:
            lengths = self._read_lengths()
        except struct.error:  # too few bytes
            lengths = []
        self._spans = _spans(self._codec, lengths)
        self._header_size = _HEADER.size + (_COUNT.size * (1 + len(lengths)) if self._codec.fine else 0)
        size = self._header_size + sum(span.codec.body_size(span.stop - span.start) for span in self._spans)
        plain = _HEADER.pack(_MAGIC, _VERSION, self._codec.number, numel)
        if self._data[: _HEADER.size] != plain or sum(lengths) != numel or len(data) != size:
            raise PayloadCorrupt(f"the bytes are not {numel} elements encoded as {codec} (format version {_VERSION}).")
        self._starts = [span.start for span in self._spans]
        self._body = tensor_over(self._data[self._header_size :])

    def _read_lengths(self) -> list[int]:
        """Numbers of elements of the ranges that the header lists. Raises `struct.error` if it is too short."""
        if not self._codec.fine:
            return [self.numel]
        (count,) = _COUNT.unpack_from(self._data, _HEADER.size)
        if count > _MOST_SPANS:
            return []
        lengths = [_COUNT.unpack_from(self._data, _HEADER.size + _COUNT.size * (1 + i))[0] for i in range(count)]
        return lengths if all(lengths[1:]) else []  # only the first may be empty

    @property
    def sparse(self) -> list[tuple[int, int]]:
        """[start, stop) of each span in a sparse codec, where a decoded 0 means that the element was not sent."""
        return [(span.start, span.stop) for span in self._spans if span.codec.sparse]

    def values(self, start: int = 0, stop: int | None = None) -> "torch.Tensor":
        """Elements [start, stop), (stop - start,) float32 on the CPU, not to be written to: memory may be shared."""
        import torch

        return self._unpacked(start, self.numel if stop is None else stop).to(torch.float32)

    def blocks(self, start: int, stop: int, longest: int) -> "Iterator[torch.Tensor]":
        """Elements [start, stop) in order, as 1-D tensors of at most `longest` elements on the CPU.

        Their dtype is one whose values float32 holds exactly. They may share memory with the encoded bytes, and must
        never be written to.
        """
        # Single numbers are unpacked as a view, groups as a copy that fits a core's cache.
        together = stop - start if self._codec.group == 1 else longest * max(1, _PIECE // longest)
        for first in range(start, stop, max(1, together)):
            yield from self._unpacked(first, min(first + together, stop)).split(longest)

    @property
    def adds(self) -> bool:
        """Whether `add_to` can be called: it takes less time than to decode elements and add them."""
        # numba, which takes 60 MB, is imported last: a run in fp32 or bf16 needs none.
        return self._codec.add is not None and len(self._spans) == 1 and plain.compiled() is not None

    def add_to(self, target: "torch.Tensor", start: int, weight: float) -> None:
        """Add elements from `start` on, where a group begins, each times `weight`, to `target`, (n,) float32.

        Product and sum are each rounded to float32.
        """
        assert self._codec.add is not None and start % self._codec.group == 0
        self._codec.add(self._body[self._codec.body_size(start) :], weight, target)

    def _unpacked(self, start: int, stop: int) -> "torch.Tensor":
        import torch

        first = max(bisect_right(self._starts, start) - 1, 0)
        last = max(bisect_left(self._starts, stop), first + 1)
        pieces = [self._of_span(s, max(start, s.start), min(stop, s.stop)) for s in self._spans[first:last]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [torch.empty(0, device="cpu")])

    def _of_span(self, span: Span, start: int, stop: int) -> "torch.Tensor":
        group, place = span.codec.group, span.codec.body_size
        start, stop, numel = start - span.start, stop - span.start, span.stop - span.start
        first, last = start - start % group, min(stop + -stop % group, numel)
        unpacked = span.codec.unpack(self._body[span.place + place(first) : span.place + place(last)], last - first)
        return unpacked if (first, last) == (start, stop) else unpacked[start - first : stop - first]

    def step_norm(self) -> float:
        """The norm of the rounding steps: of each element the distance between neighbouring representable values.

        0 for a codec that rounds every number by itself.
        """
        return math.sqrt(sum(self._squared_steps(span) for span in self._spans if span.codec.levels))

    def _squared_steps(self, span: Span) -> float:
        import torch

        missing = -(span.stop - span.start) % span.codec.group
        values = torch.nn.functional.pad(self.values(span.start, span.stop), (0, missing))
        largest = values.view(-1, span.codec.group).abs().amax(1)
        squares = (largest.to(torch.float64) / span.codec.levels).square()
        return float(squares.sum()) * span.codec.group - float(squares[-1]) * missing

    def measure(self, passing: Callable[[memoryview], object] = lambda piece: None) -> Measure:
        """Norm and number of non-finite values of all elements, computed without a decoded copy of all.

        `passing` is called with all bytes, piece by piece, while each is in a core's cache, for example to hash them.
        """
        passing(self._data[: self._header_size])
        found, body = Measure(), self._data[self._header_size :]
        for span in self._spans:
            for start in range(span.start, span.stop, _PIECE):
                stop = min(start + _PIECE, span.stop)
                first, last = (span.place + span.codec.body_size(each - span.start) for each in (start, stop))
                passing(body[first:last])
                found += span.codec.measured(self._body[first:last], stop - start)
        return found


def _measured(values: "torch.Tensor") -> Measure:
    import torch

    # A norm is finite only if all elements are, so that one reduction answers both. In float32 it is the fastest, as
    # long as no square overflows and those that become zero do not count.
    norm = float(torch.linalg.vector_norm(values))
    if 1e-14 < norm < 1e18:
        return Measure(0, norm * norm)
    if nonfinite := values.numel() - int(torch.isfinite(values).sum()):
        return Measure(nonfinite, math.inf)
    return Measure(0, float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2)
