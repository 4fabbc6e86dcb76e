"""`Handover`: moves a fragment's values out of a model in training and back, so that inner steps wait for no transfer.

Only copies in the parameters' own dtype, no arithmetic: that is left to the background and to `fp32_shadow`. Parameters
on a GPU go through pinned memory (`PinnedMemory`), all others through plain copies.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

Named = Mapping[str, torch.Tensor]
_ALIGNMENT = 64  # bytes; of each tensor in the buffer


class Handover(Protocol):
    """What the training thread and the background give to each other, one fragment at a time."""

    def take(self, parameters: Named) -> Callable[[], Named]:
        """Begin to copy the parameters as they are now. The training thread goes on at once and may change them.

        What is returned waits for the copies, which are on the CPU, and returns them. They last until the next `take`
        or `stage`.
        """
        ...

    def stage(self, parameters: Named, fill: Callable[[Named], None]) -> Callable[[], None] | None:
        """In the background: prepare new values of the parameters, which `fill` writes into tensors that it is given.

        Returns the call by which the training thread sets the parameters to them; None if nothing can be prepared.
        """
        ...


class PlainCopies:
    """`Handover` of parameters on the CPU, whose copies are made at the speed of memory."""

    def take(self, parameters: Named) -> Callable[[], Named]:
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in parameters.items()}
        return lambda: copies

    def stage(self, parameters: Named, fill: Callable[[Named], None]) -> Callable[[], None] | None:
        return None


class PinnedMemory:
    """`Handover` of parameters on a GPU: through one pinned buffer, so that the GPU copies while the CPU goes on.

    Everything the buffer is used for is in order: values are taken on the side stream behind all that the training
    thread has queued, setting the staged values of the fragment before included; the background stages values only
    after it has waited for those that were taken.

    Args:
        size: bytes of the buffer, as of `buffer_size` for the largest fragment.
        device: the GPU.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._device = device
        self._side = torch.cuda.Stream(device)

    def take(self, parameters: Named) -> Callable[[], Named]:
        training, copied = torch.cuda.current_stream(self._device), torch.cuda.Event()
        self._side.wait_stream(training)
        pinned = views_in(self._buffer, parameters)
        with torch.cuda.stream(self._side):
            for name, tensor in parameters.items():
                pinned[name].copy_(tensor.detach(), non_blocking=True)
            copied.record(self._side)
        # The GPU, not this thread, waits: whoever changes the parameters next would overtake the copy.
        training.wait_event(copied)

        def wait() -> Named:
            copied.synchronize()
            return pinned

        return wait

    def stage(self, parameters: Named, fill: Callable[[Named], None]) -> Callable[[], None] | None:
        pinned = views_in(self._buffer, parameters)
        fill(pinned)

        def set_parameters() -> None:
            for name, tensor in parameters.items():
                tensor.detach().copy_(pinned[name], non_blocking=True)

        return set_parameters


def handover_of(fragments: Sequence[Named]) -> Handover:
    """The handover for these fragments, of which one at a time is in transit: pinned if all are on one GPU."""
    devices = {tensor.device for fragment in fragments for tensor in fragment.values()}
    device = devices.pop()
    if devices or device.type != "cuda":
        return PlainCopies()
    return PinnedMemory(max(map(buffer_size, fragments)), device)


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
