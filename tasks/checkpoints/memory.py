"""Query the memory of a GPU. For the memory of the machine, see :mod:`mergegate.merge_core.system`."""

from __future__ import annotations

from mergegate.merge_core.system import Capacity


def gpu_memory(device: str) -> Capacity | None:
    """Return the total and free memory of ``cuda`` or ``cuda:N``, or None if the machine has no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device if ":" in device else torch.cuda.current_device())
    return Capacity(total, free)
