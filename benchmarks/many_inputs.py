"""Measure merges of many checkpoints: memory, reads, open files, and time compared with a plain copy.

    python benchmarks/many_inputs.py                             # 32 checkpoints of 135 M parameters in bfloat16
    python benchmarks/many_inputs.py --counts 64,128 --distinct 32 --warm
    python benchmarks/many_inputs.py --methods linear,ties --warm
    python benchmarks/many_inputs.py --growth                    # one more checkpoint in a running mean

The checkpoints have the shapes of SmolLM2-135M. Each is the same normal weights plus noise of a tenth of their scale.
They are written below ``--directory`` as a training run (``checkpoint-100``, ``checkpoint-200``, ...) and removed at
the end. A merge is a separate process, ``mergegate merge``, as a user starts it. Its recipe has ``run:`` and
``window:``. Copies (``plain_copy.py``: read all inputs once, write one checkpoint) and merges take turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from checkpoints import weight_files
from measure import Measurement, evict, family, measure

_HIDDEN, _WIDE, _KEYS, _VOCABULARY = 576, 1536, 192, 49152
_BASE, _NOISE = 0.04, 0.004
_TABLE = (1 << 22) + 57  # normal numbers; each tensor of each checkpoint begins at another one
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HIDDEN,
    "intermediate_size": _WIDE,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": _VOCABULARY,
    "tie_word_embeddings": True,
}
_LAYER = {
    "self_attn.q_proj": (_HIDDEN, _HIDDEN),
    "self_attn.k_proj": (_KEYS, _HIDDEN),
    "self_attn.v_proj": (_KEYS, _HIDDEN),
    "self_attn.o_proj": (_HIDDEN, _HIDDEN),
    "mlp.gate_proj": (_WIDE, _HIDDEN),
    "mlp.up_proj": (_WIDE, _HIDDEN),
    "mlp.down_proj": (_HIDDEN, _WIDE),
    "input_layernorm": (_HIDDEN,),
    "post_attention_layernorm": (_HIDDEN,),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the checkpoints, and print one line for each count and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="32", help="comma-separated numbers of checkpoints")
    parser.add_argument("--methods", default="linear")
    parser.add_argument("--layers", type=int, default=30, help="30 is SmolLM2-135M; fewer need less disk")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--distinct", type=int, help="further checkpoints are hard links to this many")
    parser.add_argument("--dtype", default="BF16", choices=("BF16", "F32"))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--warm", action="store_true", help="leave the inputs in the page cache")
    parser.add_argument("--handles", type=int, help="limit of open files (ulimit -n)")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--keep", action="store_true", help="do not remove the checkpoints")
    options = parser.parse_args(arguments)
    counts = sorted(int(count) for count in options.counts.split(","))
    run = options.directory / f"run-{options.layers}-{options.shards}-{options.dtype}"
    try:
        distinct = min(options.distinct or counts[-1], counts[-1])
        write_run(run, distinct, options.layers, options.shards, options.dtype)
        for number in range(distinct + 1, counts[-1] + 1):
            link = run / f"checkpoint-{100 * number}"
            if not link.exists():
                shutil.copytree(run / f"checkpoint-{100 * ((number - 1) % distinct + 1)}", link, copy_function=os.link)
        if options.growth:
            _measure_growth(run, counts, options)
            return
        print(
            f"{'method':16}{'inputs':>7}{'files':>6}{'GB':>6}{'copy':>8}{'merge':>8}{'engine':>8}{'ratio':>7}"
            f"{'least':>6}{'most':>6}{'copy cpu':>9}{'cpu':>8}{'memory':>10}{'read':>7}{'open':>6}{'load':>6}"
        )
        for method in options.methods.split(","):
            for count in counts:
                print(_measure(run, count, method, options), flush=True)
    finally:
        if not options.keep:
            shutil.rmtree(run, ignore_errors=True)


def write_run(run: Path, count: int, layers: int, shards: int, dtype: str) -> None:
    """Write the checkpoints of a training run that do not exist yet."""
    shapes = {"model.embed_tokens.weight": (_VOCABULARY, _HIDDEN), "model.norm.weight": (_HIDDEN,)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in _LAYER.items()}
    names = sorted(shapes)
    table = np.random.default_rng(0).standard_normal(_TABLE, dtype=np.float32)
    for number in range(1, count + 1):
        directory = run / f"checkpoint-{100 * number}"
        if (directory / "config.json").exists():
            continue
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        weight_map: dict[str, str] = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
            chosen = names[shard::shards]
            weight_map |= dict.fromkeys(chosen, file)
            _write_shard(directory / file, {name: shapes[name] for name in chosen}, names, number, dtype, table)
        if shards > 1:
            index = {"metadata": {}, "weight_map": weight_map}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        config = {**_CONFIG, "num_hidden_layers": layers, "torch_dtype": "bfloat16" if dtype == "BF16" else "float32"}
        (directory / "config.json").write_text(json.dumps(config))


def _write_shard(
    file: Path, shapes: dict[str, tuple[int, ...]], names: Sequence[str], number: int, dtype: str, table: np.ndarray
) -> None:
    header, position, size = {}, 0, 2 if dtype == "BF16" else 4
    for name, shape in shapes.items():
        end = position + size * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            index, count = names.index(name), math.prod(shape)
            base = np.resize(np.roll(table, 7919 * index), count) * np.float32(_BASE)
            noise = np.resize(np.roll(table, 104729 * (number * 311 + index)), count) * np.float32(_NOISE)
            values = (base + noise + (1 if "norm" in name else 0)).astype(np.float32)
            if dtype == "BF16":
                bits = values.view(np.uint32)
                out.write(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes())
            else:
                out.write(values.tobytes())


class _Peaks:
    """Peaks of a running process: bytes that it has read, and open files."""

    def __init__(self) -> None:
        self.read = self.handles = 0
        self._stopped = threading.Event()

    def __enter__(self) -> _Peaks:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.is_set():
            for pid in family(os.getpid())[1:]:
                try:
                    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
                    self.read = max(self.read, int(lines[0].split()[1]))
                    self.handles = max(self.handles, len(list(Path(f"/proc/{pid}/fd").iterdir())))
                except OSError:
                    continue  # The process ended.
            time.sleep(0.01)


def _measure(run: Path, count: int, method: str, options: argparse.Namespace) -> str:
    place = options.directory
    document: dict[str, object] = {"run": run.name, "window": count, "merge_method": method}
    if method not in ("linear", "karcher"):
        document["base_model"] = f"{run.name}/checkpoint-100"
    (place / "recipe.yaml").write_text(json.dumps(document))
    last = len(list(run.iterdir()))
    models = [f"{run.name}/checkpoint-{100 * number}" for number in range(last - count + 1, last + 1)]
    files = [file for model in models for file in weight_files(place / model)]
    out, peaks = place / "out", _Peaks()
    limit = ["prlimit", f"--nofile={options.handles}:{options.handles}"] if options.handles else []
    command = [*limit, sys.executable, "-m", "mergegate", "merge", "recipe.yaml", "out", "--device", "cpu", "--json"]

    def merge() -> Measurement:
        with peaks:
            return measure(command, cwd=place, environment={"MERGEGATE_HOME": str(place / "home")})

    contenders: dict[str, Callable[[], Measurement]] = {
        "copy": lambda: measure([sys.executable, Path(__file__).with_name("plain_copy.py"), out, *models], cwd=place),
        "merge": merge,
    }
    runs: dict[str, list[Measurement]] = {name: [] for name in contenders}
    load = os.getloadavg()[0]
    for turn in range(options.repeat + 1):
        for name, contender in contenders.items():
            shutil.rmtree(out, ignore_errors=True)
            if not options.warm:
                evict(files)
            peaks.__init__()  # type: ignore[misc]
            measured = contender()
            if turn:  # The first turn fills caches.
                runs[name].append(measured)
    shutil.rmtree(out, ignore_errors=True)
    ratios = [ours.seconds / copy.seconds for ours, copy in zip(runs["merge"], runs["copy"], strict=True)]
    size = sum(file.stat().st_size for file in files)
    medians = {name: statistics.median(one.seconds for one in measured) for name, measured in runs.items()}
    engine = statistics.median(json.loads(one.output)["seconds"] for one in runs["merge"])
    memory = max(one.peak_anonymous for one in runs["merge"])
    cpus = {name: statistics.median(one.cpu_seconds for one in measured) for name, measured in runs.items()}
    return (
        f"{method:16}{count:7}{len(files):6}{size / 1e9:6.2f}{medians['copy']:7.2f}s{medians['merge']:7.2f}s"
        f"{engine:7.2f}s{statistics.median(ratios):7.2f}{min(ratios):6.2f}{max(ratios):6.2f}"
        f"{cpus['copy']:8.2f}s{cpus['merge']:7.2f}s{memory / 2**20:6.0f} MiB"
        f"{peaks.read / size:6.2f}x{peaks.handles:6}{load:6.1f}"
    )


def _measure_growth(run: Path, counts: Sequence[int], options: argparse.Namespace) -> None:
    """Compare the mean of all checkpoints with its continuation: the stored sum plus the newest, then the mean."""
    place = options.directory

    def recipe(models: Sequence[str], weight: float, dtype: str) -> str:
        entries = [{"model": model, "parameters": {"weight": weight}} for model in models]
        document = {"merge_method": "linear", "models": entries, "parameters": {"normalize": False}, "dtype": dtype}
        return json.dumps(document)

    def merge(text: str, out: str) -> tuple[Measurement, int]:
        (place / "recipe.yaml").write_text(text)
        shutil.rmtree(place / out, ignore_errors=True)
        command = [sys.executable, "-m", "mergegate", "merge", "recipe.yaml", out, "--device", "cpu", "--json"]
        with _Peaks() as peaks:
            measured = measure(command, cwd=place, environment={"MERGEGATE_HOME": str(place / "home")})
        return measured, peaks.read

    print(
        f"{'checkpoints':>11}{'full':>8}{'read':>9}{'continued':>11}{'read':>9}{'state':>9}{'different':>11}{'load':>6}"
    )
    for count in counts:
        models = [f"{run.name}/checkpoint-{100 * number}" for number in range(1, count + 1)]
        merge(recipe(models[:-1], 1.0, "float32"), "sum")
        times: dict[str, list[float]] = {"full": [], "continued": []}
        for _ in range(options.repeat):
            full, full_read = merge(recipe(models, 1 / count, "bfloat16"), "full")
            added, added_read = merge(recipe(["sum", models[-1]], 1.0, "float32"), "next")
            mean, mean_read = merge(recipe(["next"], 1 / count, "bfloat16"), "mean")
            times["full"].append(full.seconds)
            times["continued"].append(added.seconds + mean.seconds)
        merge(recipe(models, 1.0, "float32"), "all")
        same = all(
            file.read_bytes() == (place / "all" / file.name).read_bytes() for file in weight_files(place / "next")
        )
        if not same:
            raise SystemExit("the continued sum differs from the sum of all checkpoints")
        pairs = zip(weight_files(place / "full"), weight_files(place / "mean"), strict=True)
        patterns = [[np.fromfile(file, np.uint16) for file in pair] for pair in pairs]
        different = sum(int((one != other).sum()) for one, other in patterns) / sum(one.size for one, _ in patterns)
        state = sum(file.stat().st_size for file in weight_files(place / "next"))
        print(
            f"{count:11}{statistics.median(times['full']):7.2f}s{full_read / 1e9:6.2f} GB"
            f"{statistics.median(times['continued']):10.2f}s{(added_read + mean_read) / 1e9:6.2f} GB"
            f"{state / 1e9:6.2f} GB"
            f"{different:11.3%}{os.getloadavg()[0]:6.1f}",
            flush=True,
        )
    for name in ("sum", "full", "next", "mean", "all"):
        shutil.rmtree(place / name, ignore_errors=True)


if __name__ == "__main__":
    main()
