"""Room for tokens: what a stage is about to take of the memory, checked first and watched then.

It knows no stage and no model, only rows times tokens and what the host says is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..backends.base import LanguageModel
from ..errors import OutOfMemory, lacks_memory
from ..host import Host

MAX_POSITIONS = 40_960  # max_position_embeddings of all sizes
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Room:
    """`rows` x `capacity` tokens on the device of `lm`, and `beside` more bytes.

    stage: for messages. cure: what else the user may do to need less.
    """

    stage: str
    lm: LanguageModel
    rows: int
    capacity: int
    cure: str
    beside: int = 0

    @property
    def nbytes(self) -> int:
        return self.lm.cache_bytes(self.rows, self.capacity) + self.beside

    @contextmanager
    def taken(self, host: Host) -> Iterator[None]:
        """Refuse what cannot fit; inside, memory that runs out all the same becomes OutOfMemory."""
        need, free = self.nbytes, self._free(host)
        if 0 < free < need:  # 0: the system does not say
            raise OutOfMemory(
                f"{self.stage}: {self._size(need)} of memory on {self.lm.device}, and "
                f"{free / MIB:.0f} MiB are free. {self._cure}"
            )
        try:
            yield
        except (RuntimeError, OutOfMemory) as error:  # a backend may have named it, without numbers
            if not lacks_memory(error):
                raise
            raise OutOfMemory(
                f"{self.stage}: memory ran out on {self.lm.device}. {self._size(need)} beside the "
                f"weights, and {self._free(host) / MIB:.0f} MiB are free now. {self._cure} "
                f"({error})"
            ) from error

    @property
    def _cure(self) -> str:
        return f"Free some memory, or choose a smaller language model. {self.cure}"

    def _size(self, need: int) -> str:
        return f"{self.rows} x {self.capacity} tokens need {need / MIB:.0f} MiB"

    def _free(self, host: Host) -> int:
        return host.free_memory(torch.device(self.lm.device))
