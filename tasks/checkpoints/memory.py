"""How much memory a GPU has. Of this system see :mod:`merge_core.system`."""

from __future__ import annotations

from mergegate.merge_core.system import Capacity


def gpu_memory(device: str) -> Capacity | None:
    """Of ``cuda`` or ``cuda:N``; None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device if ":" in device else torch.cuda.current_device())
    return Capacity(total, free)
