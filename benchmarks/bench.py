"""Measure how long every merge method takes, compared with a plain copy of the same bytes and with mergekit.

    python benchmarks/bench.py                                  # all methods, 1.24 B parameters in bfloat16
    python benchmarks/bench.py --size small --repeat 1          # a few minutes
    python benchmarks/bench.py --methods linear,ties --peer     # against mergekit 0.1.5 (make .venv-peer/ready)
    python benchmarks/bench.py --methods linear --avx2          # as on a processor without AVX-512
    python benchmarks/bench.py --giant 4e9                      # one tensor of 4 GB: is memory independent of it?

Every run is a separate process, started as a user starts it: ``mergegate merge RECIPE OUT``, including its startup.
Runs of one method take turns (copy, ours, peer, copy, ...). A ratio compares the runs of one turn, and the table shows
the median, the smallest and the largest. Our first run is discarded because it may compile kernels. Unless ``--warm``
is set, the script drops the page cache before each run and waits a few seconds (``--pause``) so that the machine's host
takes back free memory. Checkpoints are created once and stay in ``--directory`` until ``--clean``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from checkpoints import Family, ensure, giant_family, llama_family, weight_files
from measure import Measurement, evict, give_memory_back, measure
from recipes import METHODS, Case, case

PROJECT = Path(__file__).resolve().parent.parent
PEER = PROJECT / ".venv-peer" / "bin" / "mergekit-yaml"
SIZES = {"small": 2e8}
# Environment in which numba and torch compile and select code as for AMD's Zen 3, which has AVX2 but not AVX-512.
_AVX2 = {
    "NUMBA_CPU_NAME": "znver3",
    "NUMBA_CPU_FEATURES": "+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}


class Spread(NamedTuple):
    """Median, smallest and largest value over several turns."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Row:
    """One line of the table: medians over the runs, in bytes and seconds.

    Args:
        method: Name of the method.
        models: Number of checkpoints read.
        moved: Bytes read and written.
        copy: Seconds of the plain copy.
        ours: Seconds of our whole process.
        merge: Seconds of our merge itself, without the start of Python.
        to_copy: Our time divided by the copy's: median, smallest and largest of the turns.
        cpu: Processor seconds of our process.
        system: System part of ``cpu``.
        copy_system: System part of the copy's processor seconds.
        memory: Our peak anonymous memory.
        peer: Seconds of the peer's process, or None if the peer was not run.
        peer_to_ours: The peer's time divided by ours: median, smallest and largest of the turns.
        peer_memory: The peer's peak anonymous memory.
        vram: Our peak memory on the GPU.
        peer_vram: The peer's peak memory on the GPU.
        load: Load average of the machine before the method's first run.
    """

    method: str
    models: int
    moved: int
    copy: float
    ours: float
    merge: float
    to_copy: Spread
    cpu: float
    system: float
    copy_system: float
    memory: int
    peer: float | None
    peer_to_ours: Spread | None
    peer_memory: int | None
    vram: int
    peer_vram: int | None
    load: float


def main(
    arguments: Sequence[str] | None = None, *, device: str = "cpu", gauge: Callable[[], int] | None = None
) -> None:
    """Run the measurement and print the table; on a GPU, ``gauge`` returns the number of its bytes in use."""
    options = _options(arguments)
    family = giant_family(int(options.giant)) if options.giant else llama_family(options.size)
    place = ensure(family, options.directory)
    names = options.methods.split(",") if options.methods else METHODS
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise SystemExit(f"--methods: unknown {unknown[0]!r}; known are {', '.join(METHODS)}")
    if options.peer and not PEER.exists():
        raise SystemExit("--peer: mergekit's environment is missing; run 'make .venv-peer/ready'")
    print(_headline(family, options.warm, device))
    rows = []
    for name in names:
        rows.append(_measure_method(case(name, family.fine_tunes), place, options, device, gauge))
        print(_line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if options.markdown:
        options.markdown.write_text(_markdown(rows))
    if options.clean:
        shutil.rmtree(place)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default=1.24e9, type=lambda text: SIZES.get(text) or float(text))
    parser.add_argument("--giant", type=float, metavar="BYTES", help="one tensor of that size in place of --size")
    parser.add_argument("--methods", help="comma-separated; default: all")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--peer", action="store_true", help="also mergekit 0.1.5")
    parser.add_argument("--peer-repeat", type=int, default=1, help="its runs: it takes minutes where we take seconds")
    parser.add_argument("--warm", action="store_true", help="leave the inputs in the page cache")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds without anything before each run")
    parser.add_argument("--avx2", action="store_true", help="compute as on a processor without AVX-512")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the table of dev/measurements/merge-speed.md")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "mergegate-bench")
    parser.add_argument("--clean", action="store_true", help="remove the checkpoints at the end")
    return parser.parse_args(arguments)


def _measure_method(
    chosen: Case, place: Path, options: argparse.Namespace, device: str, gauge: Callable[[], int] | None
) -> Row:
    recipe = place / f"{chosen.method}.yaml"
    recipe.write_text(chosen.recipe)
    inputs = [file for model in chosen.models for file in weight_files(place / model)]
    out = place / "out"
    contenders: dict[str, Callable[[], Measurement]] = {
        "copy": lambda: measure(
            [sys.executable, Path(__file__).with_name("plain_copy.py"), out, *chosen.models], cwd=place
        ),
        "ours": lambda: measure(
            [Path(sys.executable).with_name("mergegate"), "merge", recipe, out, "--device", device, "--json"],
            cwd=place,
            environment=_AVX2 if options.avx2 else {},
            gauge=gauge,
        ),
    }
    if options.peer:
        how = ["--no-copy-tokenizer", "--no-write-model-card", "--random-seed", "0", "--quiet"]
        if device != "cpu":
            how += ["--device", device]
        contenders["peer"] = lambda: measure(
            [PEER, recipe, out, *how],
            cwd=place,
            environment={"HF_HUB_OFFLINE": "1", **(_AVX2 if options.avx2 else {})},
            gauge=gauge,
        )
    _remove(out)
    if not options.giant:  # --giant measures memory, and each of its runs takes a minute.
        contenders["ours"]()  # This run is discarded.
    load = os.getloadavg()[0]
    runs: dict[str, list[Measurement]] = {name: [] for name in contenders}
    for number in range(options.repeat):
        for name, run in contenders.items():
            if name == "peer" and number >= options.peer_repeat:
                continue
            _remove(out)
            if not options.warm:
                evict(inputs)
                give_memory_back(options.pause)
            runs[name].append(run())
    _remove(out)

    def median(name: str) -> float:
        return statistics.median(run.seconds for run in runs[name])

    ours, copies = runs["ours"], runs["copy"]
    written = sum(file.stat().st_size for file in weight_files(place / chosen.models[0]))
    return Row(
        method=chosen.method,
        models=len(chosen.models),
        moved=sum(file.stat().st_size for file in inputs) + written,
        copy=median("copy"),
        ours=median("ours"),
        merge=statistics.median(json.loads(run.output)["seconds"] for run in ours),
        to_copy=_spread(ours, copies),
        cpu=statistics.median(run.cpu_seconds for run in ours),
        system=statistics.median(run.system_seconds for run in ours),
        copy_system=statistics.median(run.system_seconds for run in copies),
        memory=max(run.peak_anonymous for run in ours),
        peer=median("peer") if options.peer else None,
        peer_to_ours=_spread(runs["peer"], ours) if options.peer else None,
        peer_memory=max(run.peak_anonymous for run in runs["peer"]) if options.peer else None,
        vram=max(run.peak_device for run in ours),
        peer_vram=max(run.peak_device for run in runs["peer"]) if options.peer else None,
        load=load,
    )


def _spread(runs: Sequence[Measurement], others: Sequence[Measurement]) -> Spread:
    """Return how many times the others' time each run took, turn by turn (the peer may have fewer turns)."""
    ratios = [run.seconds / other.seconds for run, other in zip(runs, others, strict=False)]
    return Spread(statistics.median(ratios), min(ratios), max(ratios))


def _remove(out: Path) -> None:
    for path in (out, out.with_name(f"{out.name}.partial")):
        shutil.rmtree(path, ignore_errors=True)


def _headline(family: Family, warm: bool, device: str) -> str:
    vram = "" if device == "cpu" else f"{'VRAM':>9}{'peer VRAM':>10}"
    cache = (
        "warm: inputs stay in the page cache" if warm else "cold: inputs dropped from the page cache before each run"
    )
    return (
        f"{family.name}: {family.parameters / 1e6:,.0f} M parameters in bfloat16, "
        f"{family.nbytes / 1e9:.2f} GB a checkpoint; {os.cpu_count()} cores, {device}; {cache}\n"
        f"{'method':17}{'models':>7}{'copy':>8}{'system':>8}{'ours':>8}{'merge':>8}{'cpu':>8}{'system':>8}{'GB/s':>7}"
        f"{'memory':>10}{'x copy':>22}{'peer':>9}{'memory':>10}{'peer x':>18}{'load':>6}{vram}"
    )


def _line(row: Row) -> str:
    peer = f"{'-':>9}{'-':>10}{'-':>18}"
    if row.peer is not None and row.peer_memory is not None and row.peer_to_ours is not None:
        peer = f"{row.peer:7.1f} s{_gib(row.peer_memory)}{_said(row.peer_to_ours, 1):>18}"
    vram = f"{_gib(row.vram)}{_gib(row.peer_vram) if row.peer_vram else '-':>10}" if row.vram else ""
    speed = row.moved / row.ours / 1e9
    return (
        f"{row.method:17}{row.models:7}{row.copy:6.1f} s{row.copy_system:6.1f} s{row.ours:6.1f} s{row.merge:6.1f} s"
        f"{row.cpu:6.1f} s{row.system:6.1f} s{speed:7.2f}{_gib(row.memory)}{_said(row.to_copy, 2):>22}{peer}"
        f"{row.load:6.1f}{vram}"
    )


def _markdown(rows: Sequence[Row]) -> str:
    with_peer = any(row.peer is not None for row in rows)
    peer_head = " mergekit | its memory | mergekit / ours |" if with_peer else ""
    lines = [
        "| method | checkpoints read | plain copy | of it system | ours | CPU | of it system | GB/s | ours / copy "
        + f"| memory |{peer_head} load |",
        "|---|" + "--:|" * (9 + 3 * with_peer + 1),
    ]
    for row in rows:
        peer = ""
        if row.peer is not None and row.peer_memory is not None and row.peer_to_ours is not None:
            peer = f" {row.peer:.0f} s | {_gib(row.peer_memory).strip()} | {_said(row.peer_to_ours, 1)} |"
        lines.append(
            f"| {row.method} | {row.models} | {row.copy:.1f} s | {row.copy_system:.1f} s | {row.ours:.1f} s "
            f"| {row.cpu:.1f} s | {row.system:.1f} s | {row.moved / row.ours / 1e9:.2f} | {_said(row.to_copy, 2)} "
            f"| {_gib(row.memory).strip()} |{peer} {row.load:.1f} |"
        )
    return "\n".join(lines) + "\n"


def _said(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.least:.{digits}f} to {spread.most:.{digits}f})"


def _gib(size: int) -> str:
    return f"{size / 2**30:6.2f} GiB"


if __name__ == "__main__":
    main()
