"""Measure how soon mergegate responds for very large models: plan, check, and the first bytes of a merge.

::

    .venv/bin/python benchmarks/huge_plan.py                       # two parents of 671 B parameters
    .venv/bin/python benchmarks/huge_plan.py --parents 3 --repeat 3 --markdown

The parents have the tensors of DeepSeek-V3 in bfloat16: 45,395 of them in 163 files, 1.3 TB each. Their headers are
real and their weights are holes in sparse files, so together they take some 20 MB of disk. The script stops a merge
after the first blocks are written, because the rest depends on bytes, not on tables.

Each command is a separate process in a project without any state. Processor time includes the process and its children.
Memory is the peak of anonymous memory (``RssAnon``), read every 20 ms. ``first`` is when the result's first file has
its first bytes. ``blocks`` is when the first megabyte of weights is written. Kernels are loaded between the two.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import anonymous_memory, family

PROJECT = Path(__file__).resolve().parent.parent
_TOKENIZER = PROJECT / "profiles/demo/models/base"
_INTERVAL = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")
_FIRST_WEIGHTS = 4 << 20  # bytes written: more than headers and journals, less than one block and its neighbors

LAYERS, DENSE, EXPERTS, SHARDS = 61, 3, 256, 163
_HIDDEN, _WIDE, _NARROW, _TOKENS, _HEADS = 7168, 18432, 2048, 129280, 128
_RECIPES = {
    "linear": {"merge_method": "linear", "parameters": {"weight": 0.5}},
    "slerp": {"merge_method": "slerp", "base_model": "one", "parameters": {"t": 0.5}},
    "ties": {"merge_method": "ties", "base_model": "one", "parameters": {"density": 0.5, "weight": 0.5}},
}
_NAMES = ("one", "two", "three")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Look:
    """One run of one command.

    Args:
        seconds: Wall-clock seconds until the awaited event.
        cpu: Processor time until then.
        memory: Peak of anonymous memory, in bytes.
    """

    seconds: float
    cpu: float
    memory: int


def deepseek_shapes(layers: int = LAYERS, experts: int = EXPERTS, dense: int = DENSE) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a checkpoint like DeepSeek-V3, without its prediction layer."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_TOKENS, _HIDDEN)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (_HIDDEN,),
            f"{at}.self_attn.q_a_proj.weight": (1536, _HIDDEN),
            f"{at}.self_attn.q_a_layernorm.weight": (1536,),
            f"{at}.self_attn.q_b_proj.weight": (192 * _HEADS, 1536),
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": (576, _HIDDEN),
            f"{at}.self_attn.kv_a_layernorm.weight": (512,),
            f"{at}.self_attn.kv_b_proj.weight": (256 * _HEADS, 512),
            f"{at}.self_attn.o_proj.weight": (_HIDDEN, 128 * _HEADS),
            f"{at}.post_attention_layernorm.weight": (_HIDDEN,),
        }
        if layer < dense:
            shapes |= _gated(f"{at}.mlp", _WIDE)
            continue
        shapes |= {f"{at}.mlp.gate.weight": (experts, _HIDDEN), f"{at}.mlp.gate.e_score_correction_bias": (experts,)}
        for expert in range(experts):
            shapes |= _gated(f"{at}.mlp.experts.{expert}", _NARROW)
        shapes |= _gated(f"{at}.mlp.shared_experts", _NARROW)
    return {**shapes, "model.norm.weight": (_HIDDEN,), "lm_head.weight": (_TOKENS, _HIDDEN)}


def write_sparse(directory: Path, shapes: Shapes, shards: int) -> Path:
    """Write a checkpoint with real headers and weights that are holes, with about the same number of bytes per file."""
    directory.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_divided(shapes, shards), start=1):
        file, end = f"model-{number:05d}-of-{shards:06d}.safetensors", 0
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name in names:
            begin, end = end, end + 2 * math.prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        (directory / file).write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(directory / file, 8 + len(text) + end)
        weight_map |= dict.fromkeys(names, file)
    # Saved indexes are in the order of names, not in that of the files.
    index = {"metadata": {"total_size": sum(2 * math.prod(shape) for shape in shapes.values())}}
    index["weight_map"] = dict(sorted(weight_map.items()))  # type: ignore[assignment]  # not the type above
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text(json.dumps(_config(shapes), indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (_TOKENIZER / name).exists():
            shutil.copyfile(_TOKENIZER / name, directory / name)
    return directory


def main() -> None:
    """Run the requested measurements and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parents", type=int, choices=(2, 3), default=2)
    parser.add_argument("--methods", default="linear,slerp,ties")
    parser.add_argument("--commands", default="plan,check,merge")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "mergegate-huge")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    shapes = deepseek_shapes()
    for name in _NAMES[: options.parents]:
        if not (options.directory / name / "tokenizer.json").exists():
            shutil.rmtree(options.directory / name, ignore_errors=True)
            write_sparse(options.directory / name, shapes, SHARDS)
    numbers = [math.prod(shape) for shape in shapes.values()]
    print(
        f"{options.parents} parents of {len(numbers):,} tensors, {sum(numbers) / 1e9:.0f} B parameters, {SHARDS} files"
    )
    rows = list(_rows(options))
    _print(rows, options.markdown)


def _rows(options: argparse.Namespace) -> Iterator[tuple[str, str, list[Look]]]:
    for method in options.methods.split(","):
        recipe = options.directory / f"{method}.yaml"
        parents = 2 if method == "slerp" else options.parents
        models = [{"model": name} for name in _NAMES[:parents]]
        recipe.write_text(json.dumps({**_RECIPES[method], "models": models, "dtype": "bfloat16"}))
        for command in options.commands.split(","):
            found: dict[str, list[Look]] = {}
            for _ in range(options.repeat):
                with tempfile.TemporaryDirectory(dir=options.directory) as project:
                    for what, look in _look(command, recipe, Path(project)).items():
                        found.setdefault(what, []).append(look)
            for what, looks in found.items():
                yield method, what, looks


def _look(command: str, recipe: Path, project: Path) -> dict[str, Look]:
    """Run ``command`` in ``project``; for a merge, report when the first bytes and the first blocks were written."""
    if command != "merge":
        return {command: _run([command, recipe], project, {"end": lambda _: False})["end"]}
    out = project / "out"
    marks = {"merge: first": lambda _: _begun(project), "merge: blocks": lambda pid: _written(pid) > _FIRST_WEIGHTS}
    return _run(["merge", recipe, out], project, marks)


def _run(words: Sequence[str | Path], project: Path, marks: Mapping[str, Callable[[int], bool]]) -> dict[str, Look]:
    """Run mergegate until it ends or until all ``marks`` (called with its pid) are reached, then kill it."""
    command = [sys.executable, "-m", "mergegate", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "NO_COLOR": "1"}
    seen: dict[str, Look] = {}
    with tempfile.TemporaryFile("w+") as said:
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=project, env=environment, stdout=said, stderr=said)
        peak, cpu = 0, 0.0
        try:
            while process.poll() is None and len(seen) < len(marks):
                pids = family(process.pid)
                peak = max(peak, sum(map(anonymous_memory, pids)))
                cpu = max(cpu, sum(map(_cpu, pids)))
                for name, reached in marks.items():
                    if name not in seen and reached(process.pid):
                        seen[name] = Look(time.monotonic() - began, cpu, peak)
                time.sleep(_INTERVAL)
            seconds = time.monotonic() - began
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        text = said.read()
    if len(seen) < len(marks):
        # No disk has room for the result, so a check ends with that message.
        if process.returncode not in (0, 3) or list(marks) != ["end"]:
            raise SystemExit(f"exit code {process.returncode} of {' '.join(command)}\n{text[-2000:]}")
        seen["end"] = Look(seconds, cpu, peak)
    return seen


def _begun(project: Path) -> bool:
    """Return whether an output file has its first bytes; its space is reserved earlier."""
    for file in project.glob("**/*.safetensors.partial"):
        with file.open("rb") as opened:
            if any(opened.read(8)):
                return True
    return False


def _written(pid: int) -> int:
    """Return the number of bytes that a process has passed to the system to write."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar:")), 0)


def _cpu(pid: int) -> float:
    """Return the processor time of a process and of its children that have ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, words[11:15])) / _TICKS


def _print(rows: Sequence[tuple[str, str, list[Look]]], markdown: bool) -> None:
    titles = ("method", "what", "seconds", "CPU s", "anonymous MiB")
    lines = [
        (
            method,
            what,
            f"{statistics.median(look.seconds for look in looks):.2f}",
            f"{statistics.median(look.cpu for look in looks):.2f}",
            f"{max(look.memory for look in looks) / 2**20:.0f}",
        )
        for method, what, looks in rows
    ]
    for line in (titles, *([("---",) * len(titles)] if markdown else []), *lines):
        print(f"| {' | '.join(line)} |" if markdown else "  ".join(f"{word:>14}" for word in line))


def _gated(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (width, _HIDDEN),
        f"{name}.up_proj.weight": (width, _HIDDEN),
        f"{name}.down_proj.weight": (_HIDDEN, width),
    }


def _divided(shapes: Shapes, shards: int) -> list[list[str]]:
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    limit, groups, filled = sum(sizes.values()) / shards, [[]], 0
    for name, size in sizes.items():
        if filled >= limit * len(groups) and len(groups) < shards:
            groups.append([])
        groups[-1].append(name)
        filled += size
    return groups


def _config(shapes: Shapes) -> dict[str, object]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": DENSE,
        "moe_layer_freq": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_attention_heads": _HEADS,
        "hidden_size": _HIDDEN,
        "intermediate_size": _WIDE,
        "moe_intermediate_size": _NARROW,
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


if __name__ == "__main__":
    main()
