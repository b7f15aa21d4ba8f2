"""Minimal honest inputs of each kind, which the hostile tests change one thing at a time."""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHAPES = {
    "model.embed_tokens.weight": [6, 4],
    "model.layers.0.mlp.up_proj.weight": [4, 4],
    "model.norm.weight": [4],
    "lm_head.weight": [6, 4],
}
CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 6},
    **{"tie_word_embeddings": False, "torch_dtype": "float32"},
}
TOKENIZER = {"model": {"type": "WordLevel", "vocab": {f"t{number}": number for number in range(6)}}, "added_tokens": []}
DATE = "2026-01-01T00-00-00.000001"
TASK = """\
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: letters.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{word}}"
doc_to_choice: [a, b]
doc_to_target: right
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
PROFILE = """\
name: hostile
recipe: recipe.yaml
evaluate:
  tasks: [{task: letters, guarded_by: base, max_drop: 3}]
"""
RECIPE = """\
merge_method: linear
models:
  - {model: ./base, parameters: {weight: 0.5}}
  - {model: ./other, parameters: {weight: 0.5}}
"""


def header(shapes: Mapping[str, list[int]] = SHAPES, **more: Any) -> dict[str, Any]:
    """Return the header of a safetensors file with float32 tensors."""
    entries: dict[str, Any] = {}
    start = 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, start + size]}
        start += size
    return {**entries, **more}


def safetensors(head: object = None, data: bytes | None = None, length: int | None = None) -> bytes:
    """Return a safetensors file with this header; a header given as bytes is used unchanged."""
    text = head if isinstance(head, bytes) else json.dumps(header() if head is None else head).encode()
    size = sum(4 * math.prod(shape) for shape in SHAPES.values())
    weights = struct.pack(f"<{size // 4}f", *(0.01 * number for number in range(size // 4)))
    return struct.pack("<Q", len(text) if length is None else length) + text + (weights if data is None else data)


def checkpoint(place: Path) -> Path:
    """Write a checkpoint that can be merged with itself."""
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(safetensors())
    (place / "config.json").write_text(json.dumps(CONFIG))
    (place / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (place / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return place


def torch_zip(members: Mapping[str, bytes], *, compress: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip in the format of torch.save."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compress) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def pickled(*instructions: bytes) -> bytes:
    """Return a pickle of these instructions."""
    return b"\x80\x02" + b"".join(instructions) + b"."


def text(word: str) -> bytes:
    """Return the instruction that pushes a text onto the stack."""
    data = word.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def tensor(
    key: str = "0", shape: bytes = b"K\x04\x85", strides: bytes = b"K\x01\x85", kind: str = "FloatStorage"
) -> bytes:
    """Return the instructions that describe a tensor of four elements."""
    storage = b"(" + text("storage") + b"ctorch\n" + kind.encode() + b"\n" + text(key) + text("cpu") + b"K\x04tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape + strides + b"\x89N" + b"tR"


def weights(*instructions: bytes, **members: bytes) -> bytes:
    """Return a torch.save file whose pickle has these instructions."""
    own = instructions or (b"}" + text("model.norm.weight") + tensor() + b"s",)
    return torch_zip({"a/data.pkl": pickled(*own), "a/data/0": bytes(16), **members})


def evil_pickle() -> bytes:
    """Return a pickle that would run a command when loaded."""

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            import os

            return os.system, ("touch EXECUTED",)

    return pickle.dumps(Evil(), protocol=2)


HASHES = ("doc_hash", "prompt_hash", "target_hash")


def samples(count: int = 40, acc: object = None) -> list[dict[str, Any]]:
    """Return the lines of a samples file; every other answer is right."""
    lines = []
    for number in range(count):
        hashes = {name: hashlib.sha256(f"{name} {number}".encode()).hexdigest() for name in HASHES}
        score = float(number % 2) if acc is None else acc
        lines.append({"doc_id": number, "filter": "none", "metrics": ["acc"], "acc": score, **hashes, "doc": {"w": 1}})
    return lines


def results(place: Path, lines: list[dict[str, Any]] | None = None, **changes: Any) -> Path:
    """Write a consistent lm-eval output directory, then apply `changes` to the results file."""
    place.mkdir(parents=True)
    lines = samples() if lines is None else lines
    hashed = "".join(line[name] for line in lines for name in HASHES)
    scores = [line["acc"] for line in lines if isinstance(line.get("acc"), (int, float))]
    known = len({line["doc_id"] for line in lines})
    mean = sum(scores) / max(len(scores), 1)
    content: dict[str, Any] = {
        "results": {"letters": {"acc,none": mean}},
        "configs": {"letters": {"metric_list": [{"metric": "acc", "aggregation": "mean"}]}},
        **{"higher_is_better": {"letters": {"acc": True}}, "versions": {"letters": 1}, "config": {}},
        "n-samples": {"letters": {"original": known, "effective": known}},
        "task_hashes": {"letters": hashlib.sha256(hashed.encode()).hexdigest()},
        **{"lm_eval_version": "0.4.13", "model_name": "m", **changes},
    }
    (place / f"results_{DATE}.json").write_text(json.dumps(content))
    (place / f"samples_letters_{DATE}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def inspect_log() -> dict[str, Any]:
    """Return a log of inspect_ai with two epochs: a scorer with one score, and one with a dictionary of scores."""
    scores = [({"value": "C" if n % 2 else "I"}, {"value": {"a": 0.5, "b": n}}) for n in range(4)]
    samples = [
        {
            **{"id": n, "epoch": epoch, "input": f"question {n}", "choices": ["x", "y"], "target": "A"},
            "messages": [{"id": "1", "role": "user", "content": "attachment://1"}],
            "output": {"choices": [{"stop_reason": "max_tokens" if n else "stop"}]},
            "scores": {"match": match, "several": several},
            **{"metadata": {"kind": n % 2}, "attachments": {"1": f"question {n}"}, "uuid": f"{n}-{epoch}"},
        }
        for n, (match, several) in enumerate(scores)
        for epoch in (1, 2)
    ]
    means = [
        {
            **{"name": name, "scorer": scorer, "metadata": {"higher_is_better": True}},
            "metrics": {"mean": {"name": "mean", "value": mean}},
        }
        for name, scorer, mean in (("match", "match", 0.5), ("a", "several", 0.5), ("b", "several", 1.5))
    ]
    reduced = [{"sample_id": n, "value": n % 2} for n in range(4)]
    return {
        **{"version": 2, "status": "success"},
        "eval": {
            **{"task": "letters", "created": "2026-11-27T00:00:00+00:00", "model": "hf/one", "config": {"epochs": 2}},
            **{"dataset": {"sample_ids": [0, 1, 2, 3]}, "packages": {"inspect_ai": "0.3.285"}},
            "scorers": [{"name": "match"}, {"name": "several", "options": {"model": None}}],
        },
        "plan": {"steps": [{"solver": "generate", "params": {"cache": False}}], "config": {"max_tokens": 8}},
        "results": {"total_samples": 8, "completed_samples": 8, "scores": means},
        "samples": samples,
        "reductions": [{"scorer": "match", "reducer": "mean", "samples": reduced}],
    }


def exported_log() -> dict[str, Any]:
    """Return a log as ``mergegate export`` writes it, in which each score has its chance level."""
    log = inspect_log()
    log["eval"] |= {"config": {}, "metadata": {"task": "letters", "lm_eval_version": "0.4.13"}}
    mean = {"mean": {"name": "mean", "value": 0.5}}
    scores = [{"name": "acc,none", "scorer": "acc,none", "metrics": mean}]
    log["results"] |= {"total_samples": 4, "completed_samples": 4, "scores": scores}
    metadata = {**dict.fromkeys(HASHES, "0" * 64), "kind": 0}
    for sample in log["samples"]:
        chance = {"acc,none": {"value": sample["id"] % 2, "metadata": {"chance": 0.25}}}
        sample |= {"metadata": metadata, "scores": chance}
    log["samples"] = [sample for sample in log["samples"] if sample["epoch"] == 1]
    return {name: value for name, value in log.items() if name != "reductions"}


def eval_log(**parts: bytes) -> bytes:
    """Return a log in the format ``.eval``: a zip. ``parts`` replace parts: header, sample, summaries or reductions."""
    log = inspect_log()
    samples, reductions = log.pop("samples"), log.pop("reductions")
    names = {f"samples/{sample['id']}_epoch_{sample['epoch']}.json": sample for sample in samples}
    summaries = [{name: sample[name] for name in ("id", "epoch", "scores", "uuid")} for sample in samples]
    contents = {"header.json": log, **names, "summaries.json": summaries, "reductions.json": reductions}
    files = {"sample": "samples/0_epoch_1.json"}
    changed = {files.get(name, f"{name}.json"): content for name, content in parts.items()}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, changed.get(name) or json.dumps(content))
    return file.getvalue()


def release(place: Path) -> Path:
    """Publish a release to a directory."""
    from release_samples import publishable

    from mergegate.tasks.release.publish.targets.directory import DirectoryTarget

    published = publishable(place / "made").publish(DirectoryTarget(path=place / "out"), place)
    return Path(published.location)
