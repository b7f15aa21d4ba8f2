"""Describe the cost of serving a model, measured on the machine that served it.

The numbers depend on the machine and its load, so they are in no key and in no release. They carry their date and
machine, because a cached verdict shows the numbers from the run that measured them.
"""

from __future__ import annotations

from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.system import cores_of_process, kernel_lines
from mergegate.merge_core.wording import format_bytes, format_count, format_short_time


class ServingCost(BaseModel):
    """Measured cost of serving a model. A value is None if it was not measured, or if a client cannot measure it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds_to_ready: float | None = None  # from the start of the process to its first answer
    seconds_to_first_token: float | None = None  # for a request of one token, after warming up; fastest of three
    tokens_per_second: float | None = None  # one stream, after warming up; fastest of three
    peak_memory: int | None = None  # bytes of main memory, all of the server's processes together
    peak_gpu_memory: int | None = None  # bytes on all GPUs together
    when: str = ""  # '2026-11-20', UTC
    machine: str = ""  # '16 cores, NVIDIA H200'

    def quantities(self) -> tuple[tuple[str, str], ...]:
        """Return name and value of each measured quantity, such as ``('time to ready', '18 s')``."""
        quantities = (
            ("time to ready", self.ready),
            ("first token", self.first_token),
            ("throughput", self.throughput),
            ("peak memory", self.memory),
            ("GPU memory", self.gpu_memory),
        )
        return tuple((name, value) for name, value in quantities if value)

    @property
    def ready(self) -> str:
        return "" if self.seconds_to_ready is None else format_short_time(self.seconds_to_ready)

    @property
    def first_token(self) -> str:
        return "" if self.seconds_to_first_token is None else format_short_time(self.seconds_to_first_token)

    @property
    def throughput(self) -> str:
        return "" if self.tokens_per_second is None else token_rate(self.tokens_per_second)

    @property
    def memory(self) -> str:
        return "" if self.peak_memory is None else format_bytes(self.peak_memory)

    @property
    def gpu_memory(self) -> str:
        return "" if self.peak_gpu_memory is None else format_bytes(self.peak_gpu_memory)

    @property
    def occasion(self) -> str:
        """Date and machine of the measurement, such as '2026-11-20, 2 cores', or an empty string."""
        return ", ".join(part for part in (self.when, self.machine) if part)

    def line(self) -> str:
        """Return one line: 'ready in 18 s · first token 12 ms · 410 tokens/s · 1.2 GB · measured 2026-11-20'."""
        parts = (
            self.ready and f"ready in {self.ready}",
            self.first_token and f"first token {self.first_token}",
            self.throughput,
            self.memory,
            self.gpu_memory and f"{self.gpu_memory} on the GPU",
            self.when and f"measured {self.when}",
        )
        return " · ".join(part for part in parts if part)


def token_rate(tokens_per_second: float) -> str:
    """Format a rate as '410 tokens/s' or '3.2 tokens/s'."""
    digits = f"{tokens_per_second:,.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.2g}"
    return f"{digits} tokens/s"


def today() -> str:
    """Return the current date in UTC, such as ``2026-11-20``."""
    return datetime.now(UTC).date().isoformat()


def machine_name(device: str) -> str:
    """Return cores and processor of this machine, and its GPUs if ``device`` is ``cuda``."""
    cores = cores_of_process()
    description = format_count(cores, "core")
    # The name of the processor as the kernel reports it, without trademarks and clock rate.
    processor = next((line.partition(":")[2] for line in kernel_lines("cpuinfo") if line.startswith("model name")), "")
    for noise in ("(R)", "(TM)", " CPU", " Processor"):
        processor = processor.replace(noise, "")
    if processor := " ".join(processor.partition("@")[0].split()):
        description += f" of {processor}"
    if device != "cuda":
        return description
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    counted = (f"{names.count(name)} of {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names))
    return ", ".join([*counted, description])
