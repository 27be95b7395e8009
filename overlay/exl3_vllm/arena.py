"""One piece of GPU memory that every EXL3 operator of the process works in, taken before vLLM profiles its memory.

Layers run one after another on one stream, so what one left there is of no use when the next begins. Reserved while
weights are loaded and never moved afterwards: captured graphs hold its address.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from exl3_vllm.errors import LayoutError

ALIGNMENT = 256


def padded_bytes(count: int, dtype: torch.dtype) -> int:
    """What `count` elements take in the arena."""
    return -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Arena:
    """The memory of one device.

    Attributes
    ----------
    overflows: calls that came with more rows than the arena was made for and took memory of their own.
    """

    def __init__(self) -> None:
        self.expected = 0
        self.largest = "nothing"
        self.overflows = 0
        self._memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def expect(self, nbytes: int, key: str) -> None:
        """Some operator will need `nbytes`; `key` says which."""
        if nbytes > self.expected:
            self.expected, self.largest = nbytes, key

    def allocate(self, device: torch.device) -> None:
        """Take what has been expected. A second model of the process (a draft) may ask for more: before any capture."""
        if self.nbytes < self.expected:
            self._memory = None
            self._memory = torch.empty(self.expected, dtype=torch.uint8, device=device)

    def take(self, nbytes: int, layer: object, rows: int, device: torch.device) -> Tensor:
        """uint8 [nbytes] with undefined content, until the next call; `layer` and `rows` say whose, if it is refused.

        Raises
        ------
        LayoutError: a graph is being captured, and the arena is too small. What a capture allocates would belong to
            that graph alone.
        """
        if self._memory is not None and nbytes <= self._memory.nbytes:
            return self._memory[:nbytes]
        if torch.cuda.is_current_stream_capturing():
            what = (
                f"needs {nbytes} bytes while a CUDA graph is captured, and {self.nbytes} are prepared ({self.largest})"
            )
            raise LayoutError(f"{layer}, {rows} rows", what, "Capture no more rows than --max-num-batched-tokens")
        self.overflows += 1
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def carve(memory: Tensor, shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> Iterator[Tensor]:
    """Tensors of these shapes and types side by side in `memory`, each aligned."""
    begin = 0
    for shape, dtype in shapes:
        count = math.prod(shape)
        yield memory[begin : begin + count * dtype.itemsize].view(dtype).view(*shape)
        begin += padded_bytes(count, dtype)


ARENA = Arena()
"""The arena of this process: a rank has one GPU."""
