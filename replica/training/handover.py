"""`Handover`: moves a fragment's values out of a model in training and back without blocking inner steps.

It only copies, in the parameters' own dtype; arithmetic is left to the background and to `fp32_shadow`. Parameters on a
GPU go through pinned memory, all others through plain copies.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

Named = Mapping[str, torch.Tensor]
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (target, source)
_ALIGNMENT = 64  # bytes; of each tensor in the buffer


class Handover:
    """Transfers a fragment's values between training thread and background, one fragment at a time: by plain copies."""

    def take(self, parameters: Named) -> Callable[[], Named]:
        """Begin to copy the parameters' current values. The training thread goes on at once and may change them.

        The returned function waits for the copies, on the CPU, and returns them. They are valid until the next `take`
        or `stage`.
        """
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in parameters.items()}
        return lambda: copies

    def stage(self, parameters: Named, fill: Callable[[Named], None]) -> Callable[[], None] | None:
        """In the background: prepare new values of the parameters. `fill` writes them into the tensors that it is
        given.

        Returns the function by which the training thread sets the parameters to them; None if nothing can be prepared,
        as on a CPU.
        """
        return None


class ThroughBuffer(Handover):
    """Transfers a fragment's values through one buffer on the CPU, for parameters on a GPU: the GPU copies meanwhile.

    Uses of the buffer are ordered: values are taken after all work that the training thread has queued on the GPU,
    including setting staged values; they are staged after taken ones were waited for and read.

    Args:
        buffer: bytes for the largest fragment, see `buffer_size`.
        copy: begins to copy the second tensor of each pair into the first; returns a function that waits for that.
    """

    def __init__(self, buffer: torch.Tensor, copy: Callable[[Pairs], Callable[[], None]]) -> None:
        self._buffer = buffer
        self._copy = copy

    def take(self, parameters: Named) -> Callable[[], Named]:
        views = views_in(self._buffer, parameters)
        wait = self._copy([(views[name], tensor.detach()) for name, tensor in parameters.items()])

        def copies() -> Named:
            wait()
            return views

        return copies

    def stage(self, parameters: Named, fill: Callable[[Named], None]) -> Callable[[], None] | None:
        views = views_in(self._buffer, parameters)
        fill(views)

        def set_parameters() -> None:
            for name, tensor in parameters.items():
                tensor.detach().copy_(views[name], non_blocking=True)

        return set_parameters


class SideStream:
    """Copies tensors from one GPU on a CUDA stream of its own. Only this class and `handover_of` need CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, pairs: Pairs) -> Callable[[], None]:
        """Copy the second tensor of each pair, as queued GPU work will leave it, into the first, in pinned memory.

        Returns without waiting; the result is a function that waits until all are copied.
        """
        training, done = torch.cuda.current_stream(self._device), torch.cuda.Event()
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done.record(self._stream)
        # The GPU waits, not this thread: what changes the parameters next must not overtake the copy.
        training.wait_event(done)
        return done.synchronize


def handover_of(fragments: Sequence[Named]) -> Handover:
    """The transfer of fragments' values, one fragment at a time: through pinned memory if all are on one GPU."""
    devices = {tensor.device for fragment in fragments for tensor in fragment.values()}
    device = devices.pop()
    if devices or device.type != "cuda":
        return Handover()
    pinned = torch.empty(max(map(buffer_size, fragments)), dtype=torch.uint8, pin_memory=True)
    return ThroughBuffer(pinned, SideStream(device).copy)


def buffer_size(tensors: Named) -> int:
    """Bytes of a buffer that holds copies of these tensors."""
    return sum(_room(tensor) for tensor in tensors.values())


def views_in(buffer: torch.Tensor, tensors: Named) -> dict[str, torch.Tensor]:
    """Contiguous tensors of the shapes and dtypes of `tensors`, one after another in a buffer of bytes."""
    found, start = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        found[name] = buffer[start : start + size].view(tensor.dtype).view(tensor.shape)
        start += _room(tensor)
    return found


def _room(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-size // _ALIGNMENT) * _ALIGNMENT
