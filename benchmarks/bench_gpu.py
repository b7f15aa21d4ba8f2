"""Run the benchmark of ``bench.py`` on a CUDA GPU: time, throughput, memory of the machine and of the GPU.

    python benchmarks/bench_gpu.py                              # options as for bench.py
    python benchmarks/bench_gpu.py --methods linear,ties --peer

GPU memory is the memory in use on the whole device minus the memory in use before the run, so nothing else should run
on it. The environment needs a torch build with CUDA, and so does the peer's environment for ``--peer``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench import main as measure_all


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurement and print the table, or print why it cannot run."""
    import torch

    if not torch.cuda.is_available():
        reason = "no CUDA device is visible" if torch.version.cuda else "this torch is built without CUDA"
        raise SystemExit(f"bench_gpu: {reason}; for the CPU: python benchmarks/bench.py")
    free_before, _ = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    print(f"{name}, {torch.cuda.get_device_properties(0).total_memory / 1e9:.0f} GB")
    measure_all(arguments, device="cuda", gauge=lambda: max(0, free_before - torch.cuda.mem_get_info()[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
