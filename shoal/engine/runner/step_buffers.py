"""`StepBuffers`: the pinned host memory through which a step's inputs go to the device, and its tokens come
back. batch.py fills the inputs; steps.py launches the step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

Copy = Callable[[torch.Tensor, torch.Tensor], None]
RING = 4  # buffers used in turn: more than the steps in flight, and at least the uploads of one step
INTS_PER_TOKEN = 6  # int32s of an input buffer at first, for each token of the largest step,
FIRST_SIZE = 1 << 18  # but no more than these


def queue_copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copies without waiting, by the device's copy engines."""
    dst.copy_(src, non_blocking=True)


class StepBuffers:
    """On a CPU a step is read in place, and its tokens are copied at once."""

    def __init__(
        self, max_num_ints: int, max_num_tokens: int, device: torch.device, upload: Copy, download: Copy
    ) -> None:
        """`max_num_ints`: the most int32s that a step downloads. `max_num_tokens`: the tokens of the largest
        step. `upload` and `download` copy between pinned memory and the device in stream order, without
        waiting."""
        self.copy, self._download = upload, download
        on_gpu = device.type == "cuda"
        first_size = min(FIRST_SIZE, INTS_PER_TOKEN * max_num_tokens)
        self._inputs = _InputRing(first_size, device, upload) if on_gpu else None
        self._tokens = [
            torch.zeros(max_num_ints, dtype=torch.int32, device="cpu", pin_memory=on_gpu) for _ in range(RING)
        ]
        self._num_steps = 0
        self._num_uploads = 0  # by the step that is being launched

    def begin_step(self) -> None:
        """To be called before the uploads of each step."""
        self._num_uploads = 0

    def upload(self, packed: np.ndarray) -> torch.Tensor:
        """Returns the int32s `packed` on the device, valid for the step that is being launched."""
        self._num_uploads += 1
        assert self._num_uploads <= RING, f"a step has more than {RING} uploads: the first is overwritten"
        return torch.from_numpy(packed) if self._inputs is None else self._inputs.upload(packed)

    def download(self, tokens_S: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Starts the copy of a step's tokens to the host. They have arrived when the event has passed (None:
        now), and are overwritten RING steps later."""
        on_host = self._tokens[self._num_steps % RING][: tokens_S.shape[0]]
        self._num_steps += 1
        self._download(on_host, tokens_S)
        if tokens_S.device.type == "cpu":
            return on_host, None
        done = torch.cuda.Event()
        done.record()
        return on_host, done

    def rehearse(self, tokens_S: torch.Tensor) -> None:
        """Launches what `download` does, for the host to load its kernel."""
        self._download(self._tokens[0][: tokens_S.shape[0]], tokens_S)


class _InputRing:
    """Pinned buffers and their twins on the device, used in turn. An event guards a buffer whose copy is
    still in flight."""

    def __init__(self, first_size: int, device: torch.device, copy: Copy) -> None:
        """`first_size`: int32s of a buffer at first."""
        self._device, self._copy = device, copy
        self._host = [self._pinned(first_size) for _ in range(RING)]
        self._device_side = [torch.empty_like(buffer, device=device) for buffer in self._host]
        self._copied = [torch.cuda.Event() for _ in range(RING)]
        self._next = 0

    @staticmethod
    def _pinned(num_ints: int) -> torch.Tensor:
        return torch.empty(num_ints, dtype=torch.int32, device="cpu", pin_memory=True)

    def upload(self, packed: np.ndarray) -> torch.Tensor:
        """Starts one copy. The returned view is valid until RING uploads later, in stream order."""
        i, self._next = self._next, (self._next + 1) % RING
        self._copied[i].synchronize()
        size = packed.shape[0]
        if self._host[i].shape[0] < size:  # it grows to the largest step met, then never again
            self._host[i] = self._pinned(2 * size)
            self._device_side[i] = torch.empty_like(self._host[i], device=self._device)
        self._host[i].numpy()[:size] = packed
        view = self._device_side[i][:size]
        self._copy(view, self._host[i][:size])
        self._copied[i].record()
        return view
