"""Tables of all hostile inputs and findings: how an honest input is changed, and the expected exit code."""

from __future__ import annotations

import json
import os
import socket
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from honest import (
    CONFIG,
    DATE,
    PROFILE,
    RECIPE,
    TASK,
    TOKENIZER,
    evil_pickle,
    header,
    pickled,
    results,
    safetensors,
    samples,
    tensor,
    text,
    torch_zip,
    weights,
)

Change = Callable[[Path], object]
DEEP = 100_000


def put(name: str, content: bytes | str | Any) -> Change:
    """Write a file; content other than bytes or text is written as JSON."""

    def change(place: Path) -> None:
        data = content if isinstance(content, (bytes, str)) else json.dumps(content)
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))

    return change


def replaced(name: str, create: Callable[[Path], object]) -> Change:
    """Replace a file by what `create` creates at its path."""

    def change(place: Path) -> None:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).unlink(missing_ok=True)
        create(place / name)

    return change


def link(name: str, target: str) -> Change:
    return replaced(name, lambda path: path.symlink_to(target))


def pipe(name: str) -> Change:
    return replaced(name, os.mkfifo)


def folder(name: str) -> Change:
    return replaced(name, Path.mkdir)


def bound_socket(name: str) -> Change:
    def bind(path: Path) -> None:
        here = Path.cwd()
        os.chdir(path.parent)  # A socket path is limited to 108 bytes.
        try:
            socket.socket(socket.AF_UNIX).bind(path.name)
        finally:
            os.chdir(here)

    return replaced(name, bind)


def without(name: str) -> Change:
    return lambda place: (place / name).unlink()


def all_of(*changes: Change) -> Change:
    def change(place: Path) -> None:
        for one in changes:
            one(place)

    return change


def head(value: object, data: bytes | None = None, length: int | None = None) -> Change:
    """Write weights with another header."""
    return put("model.safetensors", safetensors(value, data, length))


def only(name: str) -> Change:
    """Write weights that consist of one tensor with this name."""
    return head({name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(16))


def entry(**changes: Any) -> Change:
    """Change the header entry of one tensor."""
    value = header()
    value["model.norm.weight"] = {**value["model.norm.weight"], **changes}
    return head(value)


def config(**changes: Any) -> Change:
    return put("config.json", {**CONFIG, **changes})


def tokenizer(**changes: Any) -> Change:
    return put("tokenizer.json", {**TOKENIZER, **changes})


def index(weight_map: object) -> Change:
    return all_of(without("model.safetensors"), put("model.safetensors.index.json", {"weight_map": weight_map}))


def torch_file(content: bytes) -> Change:
    return all_of(without("model.safetensors"), put("pytorch_model.bin", content))


def shared_header() -> bytes:
    """Return a zip whose members all share the local header of the first one."""
    whole = torch_zip({"a/data.pkl": pickled(b"}"), "a/data/0": bytes(16), "a/data/1": bytes(16)})
    start = whole.index(b"PK\x01\x02")
    records = whole[start:]
    out, at = b"", 0
    while records[at : at + 4] == b"PK\x01\x02":
        size = 46 + sum(struct.unpack("<HHH", records[at + 28 : at + 34]))
        record = records[at : at + size]
        out += record[:42] + struct.pack("<I", 0) + record[46:]
        at += size
    return whole[:start] + out + records[at:]


def many_members() -> bytes:
    """Return a zip whose directory claims 4 GB and 65,534 members."""
    whole = torch_zip({"a/data.pkl": pickled(b"}")})
    at = whole.index(b"PK\x05\x06")
    return whole[: at + 8] + struct.pack("<HHI", 0xFFFE, 0xFFFE, 0xFFFFFFF0) + whole[at + 16 :]


def bomb(levels: int = 30) -> str:
    """Return YAML with aliases that double at each level."""
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


def chain(count: int) -> str:
    """Return recipes that each read the result of the one before."""
    step = "name: s{}\nmerge_method: linear\nmodels: [{{model: s{}, parameters: {{weight: 1}}}}]\n"
    return "---\n".join(step.format(number, number - 1) for number in range(count))


HALF = '"\\ud800"'
STATEMENT = {"_type": "https://in-toto.io/Statement/v1"}
OFFSETS = {"backwards": [400, 0], "negative": [-4, 0], "overlap": [0, 16], "huge": [2**62, 2**63 - 1], "text": "0,16"}
OFFSETS |= {"floats": [0.0, 16.0], "nan": [float("nan"), 1], "three": [0, 8, 16]}
SHAPES = {
    "negative": [-4], "huge": [2**40, 2**40], "of-many-dimensions": [1] * 100_000, "true": [True], "an-object": {},
}  # fmt: skip
INDEXED = {
    "leaves-directory": "../base/model.safetensors", "absolute": "/etc/passwd", "nul": "a\0b", "backslash": "..\\x",
}  # fmt: skip
INDEXED |= {"empty-name": "", "number": 7, "name-too-long": "x" * 5000, "to-nowhere": "nowhere.safetensors"}
VOCABULARIES: dict[str, Any] = {"integer-items": [[1, 0.5], [2, 0.5]], "list-items": [[["a"], 0.5]]}
VOCABULARIES |= {"ids-text": {"a": "0"}, "ids-negative": {"a": -1}, "ids-true": {"a": True}}


def special(title: str, name: str, kinds: str) -> dict[str, Change]:
    """Return cases in which a file is replaced by what is not a plain file of its directory."""
    changes = {
        **{"a-pipe": pipe(name), "a-socket": bound_socket(name), "a-folder": folder(name), "missing": without(name)},
        **{"a-link-out": link(name, f"../base/{name}"), "dev-zero": link(name, "/dev/zero")},
    }
    return {f"{title}-{kind}": changes[kind] for kind in kinds.split()}


CHECKPOINTS: Mapping[str, Change] = {
    "empty-weights": put("model.safetensors", b""), "seven-bytes": put("model.safetensors", bytes(7)),
    "header-longer-than-file": head(None, length=1 << 40), "header-of-all-bits": put("model.safetensors", b"\xff" * 64),
    "header-no-json": head(b"{"), "header-a-list": head([]), "header-a-number": head(b"7"),
    "header-deep": head(b"[" * DEEP), "header-deep-objects": head(b'{"a":' * DEEP),
    "header-not-utf8": head(b'{"\xff\xfe":1}'), "header-half-character": head(b"{%s:1}" % HALF.encode()),
    "header-many-values": head(b"[" + b"[]," * 3_000_000 + b"[]]"),
    "header-name-twice": head(b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{}}', b""),
    "header-empty": head(b"{}", b""), "truncated-data": head(None, b"1234"), "data-too-long": head(None, bytes(10_000)),
    **{f"offsets-{name}": entry(data_offsets=value) for name, value in OFFSETS.items()},
    "offsets-of-400-digits": head(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,%s]}}' % (b"9" * 400)),
    **{f"shape-{name}": entry(shape=value) for name, value in SHAPES.items()}, "dtype-unknown": entry(dtype="X9"),
    "dtype-a-list": entry(dtype=["F32"]), "entry-a-number": head({"a": 1}), "entry-with-more": entry(more=1),
    "metadata-a-list": head(header(__metadata__=[])), "metadata-numbers": head(header(__metadata__={"a": 1})),
    "layer-of-5000-digits": only(f"model.layers.{'9' * 5000}.a.weight"),
    "layer-ten-millions": only("model.layers.9999999.a.weight"), "name-with-nul": only("a\0b"),
    "name-with-escapes": only("\x1b[2Ja"), "name-of-a-megabyte": only("a" * 1_000_000),
    **special("weights", "model.safetensors", "a-pipe a-socket a-folder a-link-out dev-zero missing"),
    "weights-a-link-to-itself": link("model.safetensors", "model.safetensors"),
    **special("config", "config.json", "a-pipe a-socket a-folder a-link-out dev-zero missing"),
    "config-a-terminal": link("config.json", "/dev/tty"), "config-empty": put("config.json", b""),
    "config-deep": put("config.json", b"[" * DEEP),
    "config-deep-inside": put("config.json", b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"),
    "config-half-character": put("config.json", '{"a": ' + HALF + "}"),
    "config-utf16": put("config.json", json.dumps(CONFIG).encode("utf-16")), "config-a-list": put("config.json", []),
    "config-of-4000-digits": put("config.json", b'{"vocab_size": %s}' % (b"9" * 4000)),
    "config-of-20-megabytes": put("config.json", b'{"a": "' + b"x" * 20_000_000 + b'"}'),
    "config-many-values": put("config.json", b"[" + b"0," * 2_000_000 + b"0]"),
    "config-quotes-without-end": put("config.json", b"[" * 100 + b'"' + b'\\"' * 4_000_000),
    "config-architectures-numbers": config(architectures=[1, 2]),
    "config-architectures-empty": config(architectures=[]), "config-vocabulary-text": config(vocab_size="six"),
    "config-vocabulary-huge": config(vocab_size=10**30), "config-layers-huge": config(num_hidden_layers=10**9),
    "config-layers-negative": config(num_hidden_layers=-1), "config-tied-text": config(tie_word_embeddings="yes"),
    "config-text-part-a-list": config(text_config=[1]),
    "config-infinity": put("config.json", json.dumps({**CONFIG, "limit": float("inf")})),
    **{f"index-{name}": index({"a": value}) for name, value in INDEXED.items()}, "index-a-list": index([1]),
    "index-to-a-pipe": all_of(index({"a": "p.safetensors"}), pipe("p.safetensors")),
    "index-to-a-linked-folder": all_of(index({"a": "sub/model.safetensors"}), link("sub", "../base")),
    "index-half-character": all_of(
        without("model.safetensors"), put("model.safetensors.index.json", '{"weight_map": {"a": ' + HALF + "}}")
    ),
    "index-a-pipe": all_of(without("model.safetensors"), pipe("model.safetensors.index.json")),
    **special("tokenizer", "tokenizer.json", "a-pipe a-link-out dev-zero"),
    "tokenizer-empty": put("tokenizer.json", b""), "tokenizer-no-vocabulary": tokenizer(model={}),
    **{f"tokenizer-{name}": tokenizer(model={"vocab": value}) for name, value in VOCABULARIES.items()},
    "tokenizer-added-a-number": tokenizer(added_tokens=7), "tokenizer-model-a-list": tokenizer(model=[]),
    "tokenizer-deep": put("tokenizer.json", b'{"a":' * DEEP),
    "tokenizer-half-character": put("tokenizer.json", '{"model": {"vocab": {' + HALF + ": 0}}}"),
    "tokenizer-all-moved": tokenizer(model={"vocab": {f"u{n}": n for n in range(200_000)}}),
    "tokenizer-config-a-list": put("tokenizer_config.json", []),
    "vocabulary-of-texts": all_of(without("tokenizer.json"), put("vocab.json", {"a": "b"})),
    "merges-a-key": link("merges.txt", "/etc/passwd"),
    "template-a-link-out": link("chat_template.jinja", "/etc/passwd"), "template-a-pipe": pipe("chat_template.jinja"),
    "template-not-utf8": put("chat_template.jinja", b"\xff\xfe"),
    "more-templates-a-link-out": link("additional_chat_templates/x.jinja", "/etc/passwd"),
    "code-a-link-out": link("modeling_x.py", "/etc/passwd"), "processor-a-pipe": pipe("preprocessor_config.json"),
    "dangling-link-out": link("vocab.txt", "/nowhere/at/all"),
    "pickle-runs-a-command": torch_file(torch_zip({"a/data.pkl": evil_pickle()})),
    "pickle-of-old": torch_file(evil_pickle()), "pickle-no-zip": torch_file(b"PK\x03\x04" + bytes(100)),
    "pickle-compressed": torch_file(torch_zip({"a/data.pkl": pickled(b"}")}, compress=zipfile.ZIP_DEFLATED)),
    "pickle-shared-header": torch_file(shared_header()), "pickle-four-billion-members": torch_file(many_members()),
    "pickle-without-end": torch_file(weights(b"}" * 5)[:-40]),
    "pickle-marks": torch_file(weights(b"(" * 16_000, b"K\x01" * 8_000, b"t" * 16_000)),
    "pickle-deep-tuples": torch_file(weights(b")", b"\x85" * 200_000)),
    "pickle-many-instructions": torch_file(weights(b"N0" * 10, b"N" * 3_000_000)),
    "pickle-stack-empty": torch_file(weights(b"0")), "pickle-below-mark": torch_file(weights(b"K\x01(\x85")),
    "pickle-key-half-character": torch_file(weights(b"}X\x03\x00\x00\x00\xed\xa0\x80", tensor(), b"s")),
    "pickle-storage-unknown": torch_file(weights(b"}", text("a"), tensor(kind="EvilStorage"), b"s")),
    "pickle-beyond-storage": torch_file(weights(b"}", text("a"), tensor(shape=b"M\xff\xff\x85"), b"s")),
    "pickle-without-bytes": torch_file(weights(b"}", text("a"), tensor(key="7"), b"s")),
    "pickle-shape-a-dictionary": torch_file(weights(b"}", text("a"), tensor(shape=b"}"), b"s")),
    "pickle-a-pipe": all_of(without("model.safetensors"), pipe("pytorch_model.bin")),
}  # fmt: skip

WEIGHTS = {"of-400-digits": "9" * 400, "of-400-digits-as-text": f"'{'9' * 400}'", "infinite": ".inf", "nan": ".nan"}
WEIGHTS |= {"1e999": "1.0e+999", "base-60": ":".join(["59"] * 50_000), "a-mapping": "{}", "a-date": "2024-01-02"}
PATHS = {"too-long": "./" + "x" * 5000, "nul": '"./a\\0b"', "of-nobody": "~nobody-at-all/x", "many-ats": "a@b@c@d"}
PATHS |= {"passwd": "/etc/passwd", "dev-zero": "/dev/zero"}
RECIPES: Mapping[str, str | bytes] = {
    "empty": "", "nothing": "---\n---\n", "not-utf8": b"\xff\xfe\x00", "nul": b"merge_method: \x00",
    "half-character": 'merge_method: "\\ud800"', "half-character-name": RECIPE + 'name: "\\uD83D"',
    "deep-list": "[" * DEEP, "deep-mapping": "{a: " * DEEP,
    "deep-blocks": "".join(" " * n + "a:\n" for n in range(600)), "aliases": bomb(),
    "aliases-in-models": "base_model: &x [1]\n" + RECIPE, "alias-of-itself": "a: &a [*a]",
    "alias-of-nothing": RECIPE + "name: *nothing",
    "alias-of-a-long-text": "a: &a " + "x" * 100_000 + "\nb: [" + "*a," * 5000 + "]",
    "merged-keys": "a: &a {x: 1}\n<<: [*a, *a]\n", "key-twice": RECIPE + "dtype: float32\ndtype: float16\n",
    "key-a-list": RECIPE + "[1, 2]: 3\n", "key-a-number": RECIPE + "7: 3\n", "date": RECIPE + "dtype: 2024-13-45\n",
    "real-date": RECIPE + "dtype: 2024-01-02\n", "empty-int": RECIPE + "dtype: !!int ''\n",
    "binary": RECIPE + "dtype: !!binary aGVsbG8=\n", "set": RECIPE + "dtype: !!set {a, b}\n",
    "python": RECIPE + "dtype: !!python/object/apply:os.system ['touch EXECUTED']\n",
    **{f"weight-{name}": RECIPE.replace("0.5", value) for name, value in WEIGHTS.items()},
    "hex-of-5000-digits": RECIPE.replace("0.5", "0x" + "f" * 5000),
    "model-null": "merge_method: linear\nmodels: [{model: }]\n",
    "model-a-list": "merge_method: linear\nmodels: [{model: [a]}]\n",
    "models-a-mapping": "merge_method: linear\nmodels: {a: b}\n",
    **{f"model-{name}": RECIPE.replace("./other", value) for name, value in PATHS.items()},
    "models-many": "merge_method: linear\nmodels:\n" + "".join(f"  - model: ./m{n}\n" for n in range(3000)),
    "model-twice-many": "merge_method: linear\nmodels:\n" + "  - model: ./base\n" * 3000, "documents-1500": chain(1500),
    "documents-200-in-a-chain": chain(200).replace("model: s-1", "model: ./nowhere"),
    "documents-in-a-circle": chain(2).replace("model: s-1", "model: s1") + "---\n" + RECIPE,
    "method-a-list": "merge_method: [linear]\nmodels: []\n", "method-a-number": "merge_method: 7\nmodels: []\n",
    "method-long": f"merge_method: {'x' * 100_000}\nmodels: []\n",
    "layers-huge": "merge_method: passthrough\nslices: [{sources: [{model: ./base, layer_range: [0, 99999999999]}]}]\n",
    "layers-backwards": "merge_method: passthrough\nslices: [{sources: [{model: ./base, layer_range: [5, 1]}]}]\n",
    "template-a-list": RECIPE + "chat_template: [a]\n", "dtype-a-mapping": RECIPE + "dtype: {a: b}\n",
    "megabyte": "# " + "x" * 1_000_000 + "\n" + RECIPE, "values-many": RECIPE + "dtype: [" + "a," * 200_000 + "]\n",
    "escapes": 'merge_method: "\\e[2J\\e]0;owned\\a"\nmodels: []\n',
    "filters-many": RECIPE.replace("0.5", "[" + "{filter: a, value: 1}," * 8000 + "]"),
}  # fmt: skip

DROPS = {"nan": ".nan", "infinite": ".inf", "of-400-digits": "9" * 400, "negative": "-3", "a-list": "[3]"}
PROFILES: Mapping[str, str | bytes] = {
    "empty": "", "not-utf8": b"\xff", "a-list": "[1, 2]",
    "key-twice": PROFILE.replace("max_drop: 3", "max_drop: 3, max_drop: 100"), "name-twice": PROFILE + "name: other\n",
    "aliases": PROFILE + bomb(),
    "aliases-in-recipe": "name: x\nrecipe:\n" + "".join(f"  {line}\n" for line in bomb().splitlines()),
    "deep": "name: " + "[" * DEEP, "deep-recipe": "name: x\nrecipe: " + "{a: " * 45 + "1" + "}" * 45,
    "name-a-path": PROFILE.replace("hostile", "../../etc"),
    "name-half-character": PROFILE.replace("hostile", '"\\ud800"'), "name-nul": PROFILE.replace("hostile", '"a\\0b"'),
    "name-a-date": PROFILE.replace("name: hostile", "name: !!timestamp 2024-01-02"),
    **{f"drop-{name}": PROFILE.replace("max_drop: 3", f"max_drop: {value}") for name, value in DROPS.items()},
    "tasks-a-number": "name: x\nrecipe: recipe.yaml\nevaluate: {tasks: 7}\n",
    "recipe-nul": 'name: x\nrecipe: "a\\0b"\n', "recipe-too-long": f"name: x\nrecipe: {'x' * 5000}\n",
    "recipe-a-folder": "name: x\nrecipe: base\n", "recipe-missing": "name: x\nrecipe: nowhere.yaml\n",
    "recipe-dev-zero": "name: x\nrecipe: /dev/zero\n", "recipe-a-number": "name: x\nrecipe: 7\n",
    "seed-huge": PROFILE + "merge: {seed: " + "9" * 4000 + "}\n",
    "remedies-many-levels": PROFILE + "remedies: [" + "{a: " * 40 + "1" + "}" * 40 + "]\n",
    "python": "name: !!python/name:os.system\n", "publish-nul": PROFILE + 'publish: {to: directory, path: "a\\0b"}\n',
    "code-accepted-a-number": PROFILE + "checks: {code: {accepted: [7]}}\n",
    "unknown-keys-many": PROFILE + "".join(f"k{n}: 1\n" for n in range(2000)),
}  # fmt: skip

TASKS: Mapping[str, Change] = {
    "empty": put("task.yaml", ""), "not-utf8": put("task.yaml", b"\xff"),
    "deep": put("task.yaml", "task: " + "[" * DEEP), "aliases": put("task.yaml", TASK + bomb()),
    "name-a-list": put("task.yaml", TASK.replace("task: letters", "task: [7]")),
    "no-name": put("task.yaml", TASK.replace("task: letters", "")),
    "includes-itself": put("task.yaml", TASK + "include: task.yaml\n"),
    "includes-a-circle": all_of(put("task.yaml", "task: a\ninclude: b.yaml\n"), put("b.yaml", "include: task.yaml\n")),
    "includes-a-chain": all_of(
        put("task.yaml", TASK + "include: i0.yaml\n"),
        *(put(f"i{n}.yaml", f"include: i{n + 1}.yaml\n") for n in range(60)),
    ),
    "includes-nothing": put("task.yaml", TASK + "include: nowhere.yaml\n"),
    "includes-nul": put("task.yaml", TASK + 'include: "a\\0b"\n'),
    "includes-a-pipe": all_of(put("task.yaml", TASK + "include: p.yaml\n"), pipe("p.yaml")),
    "includes-dev-zero": put("task.yaml", TASK + "include: /dev/zero\n"),
    "includes-many": all_of(
        put("task.yaml", TASK + "include: [" + "b.yaml, " * 20_000 + "]\n"), put("b.yaml", "fewshot_split: test\n")
    ),
    "data-missing": put("task.yaml", TASK), "data-nul": put("task.yaml", TASK.replace("letters.jsonl", '"a\\0b"')),
    "data-too-long": put("task.yaml", TASK.replace("letters.jsonl", "x" * 5000)),
    "data-a-pipe": all_of(put("task.yaml", TASK), pipe("letters.jsonl")),
    "data-dev-zero": put("task.yaml", TASK.replace("letters.jsonl", "/dev/zero")),
    "data-kwargs-a-list": put("task.yaml", TASK.replace("{data_files: {test: letters.jsonl}}", "[1]")),
    "data-pattern-odd": put("task.yaml", TASK.replace("letters.jsonl", '"**[a"')),
    "group-in-itself": put("task.yaml", "group: g\ntask: [g]\n"),
    "group-of-nothing": put("task.yaml", "group: g\ntask: []\n"),
    "group-of-numbers": put("task.yaml", "group: g\ntask: [1, 2]\n"),
    "group-deep": put("task.yaml", "group: g\ntask: " + "[{group: h, task: " * 20 + "x" + "}]" * 20 + "\n"),
    "function-no-python": all_of(put("task.yaml", TASK + "process_docs: !function f.g\n"), put("f.py", "def (:\n")),
    "function-nul": all_of(put("task.yaml", TASK + "process_docs: !function f.g\n"), put("f.py", b"a\x00b")),
    "function-deep": all_of(put("task.yaml", TASK + "process_docs: !function f.g\n"), put("f.py", "(" * 5000)),
    "function-a-pipe": all_of(put("task.yaml", TASK + "process_docs: !function f.g\n"), link("f.py", "/dev/zero")),
    "function-python-tag": put("task.yaml", TASK + "process_docs: !!python/name:os.system\n"),
    "a-pipe": pipe("task.yaml"), "dev-zero": link("task.yaml", "/dev/zero"), "missing": put("other.yaml", ""),
}  # fmt: skip


def edited(change: Callable[[list[dict[str, Any]]], object]) -> Change:
    """Write results with changed samples; everything else is made consistent with them."""

    def write(place: Path) -> None:
        lines = samples()
        change(lines)
        results(place, lines)

    return write


def stated(**changes: Any) -> Change:
    """Write honest samples with results that state something else."""
    return lambda place: results(place, **changes)


def raw(name: str, content: bytes | str) -> Change:
    """Write honest results with one file replaced."""
    return all_of(results, put(name, content))


_RESULTS, _SAMPLES = f"results_{DATE}.json", f"samples_letters_{DATE}.jsonl"


def more_documents(lines: list[dict[str, Any]]) -> None:
    lines.append({**lines[3], "doc_hash": "0" * 64})


def doubled(lines: list[dict[str, Any]]) -> None:
    lines += [dict(line) for line in lines]


def first_sample(**values: Any) -> Change:
    return edited(lambda lines: lines[0].update(values))


SCORES = {"1000": 1000.0, "negative": -1.0, "nan": float("nan"), "infinite": float("inf")}
DOCUMENTS = {"negative": -1, "beyond": 10**6, "true": True, "of-1e30": 10**30}
COUNTS: dict[str, Any] = {
    **{name: {"letters": {"original": n, "effective": m}} for name, n, m in (("fewer", 40, 39), ("more", 80, 80))},
    **{"none": {}, "text": {"letters": {"original": "40", "effective": "40"}}, "a-list": {"letters": [40]}},
}
RESULTS: Mapping[str, Change] = {
    "empty-folder": lambda place: place.mkdir(), "results-empty": raw(_RESULTS, b""),
    "results-a-list": raw(_RESULTS, "[]"), "results-deep": raw(_RESULTS, b"[" * DEEP),
    "results-half-character": raw(_RESULTS, '{"results": ' + HALF + "}"),
    "results-many-values": raw(_RESULTS, b"[" + b"0," * 2_000_000 + b"0]"),
    "results-a-pipe": all_of(results, pipe(_RESULTS)), "results-a-device": all_of(results, link(_RESULTS, "/dev/zero")),
    **{f"score-{name}": first_sample(acc=value) for name, value in SCORES.items()},
    "score-text": edited(lambda lines: [line.update(acc="1") for line in lines]),
    "score-of-4000-digits": raw(_SAMPLES, b'{"doc_id": 0, "acc": %s}' % (b"9" * 4000)),
    "score-missing": edited(lambda lines: lines[0].pop("acc")), "document-twice": edited(more_documents),
    "every-document-twice": edited(doubled),
    **{f"document-{name}": first_sample(doc_id=value) for name, value in DOCUMENTS.items()},
    "metrics-of-lists": edited(lambda lines: lines[0].update(metrics=[["acc"]])),
    "metrics-many": edited(lambda lines: lines[0].update(metrics=[f"m{n}" for n in range(10_000)])),
    "hash-a-number": raw(_SAMPLES, json.dumps({**samples(1)[0], "doc_hash": 7})),
    "hash-long": raw(_SAMPLES, json.dumps({**samples(1)[0], "doc_hash": "0" * 1_000_000})),
    **{f"counts-{name}": stated(**{"n-samples": value}) for name, value in COUNTS.items()},
    "mean-another": stated(results={"letters": {"acc,none": 0.9}}),
    "mean-text": stated(results={"letters": {"acc,none": "0.5"}}), "mean-a-list": stated(results={"letters": [1]}),
    "directions-a-list": stated(higher_is_better={"letters": ["acc"]}), "configs-a-list": stated(configs=["letters"]),
    "metric-list-a-number": stated(configs={"letters": {"metric_list": 7}}, results={}),
    "hashes-a-list": stated(task_hashes=["letters"]), "hash-another": stated(task_hashes={"letters": "0" * 64}),
    "groups-in-a-circle": stated(group_subtasks={"letters": ["other"], "other": ["letters"]}),
    "groups-of-numbers": stated(group_subtasks={"letters": 7}, configs={}),
    "groups-that-double": stated(
        group_subtasks={"letters": ["g0", "g0"], **{f"g{n}": [f"g{n + 1}"] * 2 for n in range(60)}}, configs={}
    ),
    "group-of-paths": stated(
        group_subtasks={"letters": ["../../x"]}, configs={"../../x": {}}, task_hashes={"../../x": "0" * 64}
    ),
    "samples-missing": all_of(results, without(_SAMPLES)), "samples-empty": raw(_SAMPLES, b""),
    "samples-cut": raw(_SAMPLES, json.dumps(samples(1)[0])[:-10]), "samples-deep": raw(_SAMPLES, b"[" * DEEP),
    "samples-not-utf8": raw(_SAMPLES, b'{"doc_id": "\xff"}'), "samples-a-pipe": all_of(results, pipe(_SAMPLES)),
    "samples-dev-zero": all_of(results, link(_SAMPLES, "/dev/zero")),
    "samples-a-long-line": raw(_SAMPLES, b" " * 20_000_000),
    "samples-many-lines": raw(_SAMPLES, (json.dumps(samples(1)[0]) + "\n").encode() * 400_000),
}  # fmt: skip


RELEASES: Mapping[str, Change] = {
    "honest": lambda place: None, "a-file-more": put("more.txt", "x"), "a-hidden-file-more": put(".more", "x"),
    "a-linked-folder-more": link("more", "/etc"), "a-linked-folder-in-a-folder": link("licenses/more", "/etc"),
    "a-link-more": link("more.txt", "/etc/passwd"), "a-link-inside-more": link("more.txt", "config.json"),
    "a-dangling-link-more": link("more.txt", "/nowhere"), "a-link-to-itself-more": link("more.txt", "more.txt"),
    "a-pipe-more": pipe("more"), "a-socket-more": bound_socket("more"), "a-device-linked": link("more", "/dev/zero"),
    "a-cache-that-is-a-link": link(".cache", "/etc"), "a-pipe-called-gitattributes": pipe(".gitattributes"),
    "a-cache-of-a-download": put(".cache/huggingface/x.lock", ""),
    "weights-a-link-out": link("model.safetensors", "/dev/zero"), "weights-a-pipe": pipe("model.safetensors"),
    "provenance-deep": put("provenance.json", b"[" * DEEP), "provenance-a-list": put("provenance.json", "[]"),
    "provenance-a-pipe": pipe("provenance.json"),
    "provenance-half-character": put("provenance.json", '{"_type": ' + HALF + "}"),
    "provenance-of-strange-types": put("provenance.json", {**STATEMENT, "subject": 7, "predicate": [1]}),
    "provenance-subjects-strange": put("provenance.json", {**STATEMENT, "subject": [7, [], {"name": []}]}),
    "recipe-aliases": put("recipe.yaml", bomb()), "recipe-deep": put("recipe.yaml", "[" * DEEP),
    "recipe-dates": put("recipe.yaml", "a: 2024-13-45"), "recipe-not-utf8": put("recipe.yaml", b"\xff\xff"),
    "card-aliases": put("README.md", "---\n" + bomb() + "---\n"),
    "card-deep": put("README.md", "---\na: " + "[" * DEEP + "\n---\n"),
    "card-strange-types": put("README.md", "---\nbase_model: 7\nlicense: [1]\n---\n"),
    "card-names-no-text": put("README.md", "---\nlicense: mit\non: merge\n7: 8\n---\n"),
    "sums-not-utf8": put("SHA256SUMS", b"\xff" * 100),
    "sums-of-a-million-lines": put("SHA256SUMS", b"a  b\n" * 1_000_000), "sums-a-pipe": pipe("SHA256SUMS"),
    "bill-deep": put("bom.cdx.json", b"[" * DEEP),
    "bill-strange-types": put("bom.cdx.json", {"components": [7, {"name": [], "hashes": 7}]}),
    "signature-garbage": put("model.sig", b"\xff\x00"), "signature-deep": put("model.sig", b"[" * DEEP),
    "everything-gone": lambda place: [one.unlink() for one in place.iterdir() if one.is_file()],
}  # fmt: skip
REFUSED = (
    *("layer-of-5000-digits", "layer-ten-millions", "name-with-nul", "name-with-escapes", "name-of-a-megabyte"),
    *("config-vocabulary-huge", "config-layers-huge", "tokenizer-all-moved"),
)
VALID = ("config-architectures-empty", "config-infinity", "honest", "a-cache-of-a-download")


def exit_code(name: str, otherwise: int) -> int:
    """Return the expected exit code of a case. Most cases of a table have the code ``otherwise``."""
    return 0 if name in VALID else 3 if name in REFUSED else otherwise


__all__ = ["CHECKPOINTS", "PROFILES", "RECIPES", "RELEASES", "RESULTS", "TASKS", "exit_code"]
