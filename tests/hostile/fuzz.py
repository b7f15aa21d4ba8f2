"""Fuzz every parser of untrusted files: each execution must end in a value or in a MergegateError.

::

    python tests/hostile/fuzz.py --executions 1000000            # `make fuzz`; half an hour or more on one core
    python tests/hostile/fuzz.py --only recipe --seed 7 --executions 50000

Inputs that end in any other way are written to ``found/`` next to this file; add each as a row to ``corpus.py``. An
execution of more than five seconds also counts. The seeds are the honest inputs and the corpus of earlier findings.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import logging
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parent), str(HERE.parent / "publish")]

import corpus  # noqa: E402  # found by the line above
from gguf_samples import F32, Q8_0, gguf  # noqa: E402
from honest import (  # noqa: E402
    CONFIG,
    DATE,
    PROFILE,
    RECIPE,
    SHAPES,
    TASK,
    TOKENIZER,
    checkpoint,
    eval_log,
    exported_log,
    inspect_log,
    results,
    safetensors,
)
from honest import samples as sample_lines  # noqa: E402
from honest import weights as torch_weights  # noqa: E402
from mutations import mutated  # noqa: E402
from pydantic import BaseModel  # noqa: E402

from mergegate.flows.profile import parse_profile  # noqa: E402
from mergegate.merge_core import load_recipe, open_checkpoint, plan_with_findings  # noqa: E402
from mergegate.merge_core.checkpoint import fetch_header, parse_gguf_header  # noqa: E402
from mergegate.merge_core.checkpoint.pickled_file import parse_pickled  # noqa: E402
from mergegate.merge_core.checkpoint.vocabulary import read_vocabulary, vocabulary_differences  # noqa: E402
from mergegate.merge_core.errors import MergegateError  # noqa: E402
from mergegate.merge_core.files import JournalLocation, open_journal  # noqa: E402
from mergegate.merge_core.parsing import parse_line, parse_yaml  # noqa: E402
from mergegate.merge_core.recipe import parse_reference, resolve_local  # noqa: E402
from mergegate.tasks.base.store import MANIFEST, VALUE, Store, StoreMiss  # noqa: E402
from mergegate.tasks.models.checkpoints import parse_card  # noqa: E402
from mergegate.tasks.preflight.licenses.resolve import CardSource, read_declaration  # noqa: E402
from mergegate.tasks.quality.evaluation.definitions.task_file import local_imports  # noqa: E402
from mergegate.tasks.quality.evaluation.definitions.tree import task_tree  # noqa: E402
from mergegate.tasks.quality.evaluation.results import find_results, read_task  # noqa: E402
from mergegate.tasks.quality.evaluation.scoring.metrics import choose_metrics  # noqa: E402
from mergegate.tasks.release.publish.releases.verify import check_release  # noqa: E402

SLOW = 5  # Limit of one execution, in seconds.
PLACE = Path("x")


@dataclass(frozen=True)
class Target:
    """A parser and its seed inputs."""

    parse: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


@dataclass
class Found:
    """The results of a fuzzing run."""

    executions: int = 0
    seconds: float = 0.0
    values: int = 0  # Executions that ended in a value.
    by_target: Counter[str] = field(default_factory=Counter)
    costs: Counter[str] = field(default_factory=Counter)  # CPU seconds by target.
    failures: list[tuple[str, bytes, str]] = field(default_factory=list)


@dataclass(frozen=True)
class HeldRelease:
    """A release in memory with one mutated file."""

    contents: Mapping[str, bytes]
    known: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    changed: str | None = None
    where: str = "release"
    version: str | None = None

    def files(self) -> Mapping[str, tuple[int, str]]:
        new = self.contents if self.changed is None else {self.changed: self.contents[self.changed]}
        return {**self.known, **{name: (len(one), hashlib.sha256(one).hexdigest()) for name, one in new.items()}}

    def download(self) -> Path:
        raise NotImplementedError

    def read(self, name: str) -> bytes:
        return self.contents[name]


class Note(BaseModel):
    """The value of the stages whose stored state is mutated."""

    text: str


def _made(out: Path) -> Note:
    (out / "file").write_bytes(b"content")
    return Note(text="x")


def targets(place: Path, release: Path | None) -> dict[str, Target]:
    """Return all targets, with their files in `place`; None leaves out those of a published ``release``."""
    honest = open_checkpoint(checkpoint(place / "base"))
    recipe = load_recipe(RECIPE)
    known = read_vocabulary(place / "base")
    assert known is not None
    for name in ("checkpoint", "index"):
        checkpoint(place / name)
    (place / "index" / "model.safetensors").rename(place / "index" / "a.safetensors")
    for name in ("task", "card", "tokens"):
        (place / name).mkdir()
    results(place / "results")
    results(place / "samples")

    def header(data: bytes) -> object:
        return fetch_header(lambda start, count: data[start : start + count], len(data), PLACE)

    def gguf_header(data: bytes) -> object:
        return parse_gguf_header(io.BytesIO(data), len(data), PLACE)

    def of_checkpoint(name: str, *, planned: bool = False) -> Callable[[bytes], object]:
        def parse(data: bytes) -> object:
            (place / "checkpoint" / name).write_bytes(data)
            try:
                other = open_checkpoint(place / "checkpoint")
                return plan_with_findings(recipe, {"./base": honest, "./other": other}) if planned else other
            finally:
                if name == "config.json":
                    (place / "checkpoint" / name).write_text(json.dumps(CONFIG))
                else:
                    (place / "checkpoint" / name).unlink()

        return parse

    def reads(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
        """Return a parser that reads a file."""

        def parse(data: bytes) -> object:
            path.write_bytes(data)
            return read()

        return parse

    def tokens() -> object:
        found = read_vocabulary(place / "tokens")
        return vocabulary_differences(found, known) if found else None

    def card() -> object:
        data = (place / "card" / "README.md").read_bytes()
        return parse_card(data), read_declaration(CardSource(place / "card"))

    def a_recipe(data: bytes) -> object:
        return load_recipe(data.decode(errors="surrogateescape")).canonical()

    def profile(data: bytes) -> object:
        documents = parse_yaml(data.decode(errors="replace"), "p")
        return parse_profile(documents[0] if documents and isinstance(documents[0], dict) else {}, "p").candidates()

    def a_pickle(data: bytes) -> object:
        return parse_pickled(io.BytesIO(data), len(data), PLACE)

    def description(data: bytes) -> object:
        return a_pickle(torch_weights(data))

    def of_results(folder: str, name: str) -> Callable[[bytes], object]:
        return reads(place / folder / name, lambda: read_task(find_results(place / folder), "letters"))

    def log(data: bytes, name: str = "log.json") -> object:
        (place / name).write_bytes(data)
        read = read_task(find_results(place / name), "letters", "kind")
        return [choose_metrics(read.outcomes, row.metric, name).judge(read.outcomes, name) for row in read.outcomes[:1]]

    def log_part(part: str) -> Callable[[bytes], object]:
        return lambda data: log(eval_log(**{part: data}), "log.eval")

    def reference(data: bytes) -> object:
        return resolve_local(parse_reference(data.decode(errors="surrogateescape"), "r"), place)

    held = (
        {one.relative_to(release).as_posix(): one.read_bytes() for one in release.rglob("*") if one.is_file()}
        if release
        else {}
    )

    def of_release(name: str) -> Callable[[bytes], object]:
        return lambda data: check_release(HeldRelease({**held, name: data}))

    kept = Store(place / "store")
    made, said = "a" * 64, "b" * 64
    kept.build("made", made, Note, _made)
    kept.build_value("said", said, Note, lambda: Note(text="x"))

    def of_store(file: Path, find: Callable[[], object]) -> Target:
        def parse(data: bytes) -> object:
            file.write_bytes(data)
            try:
                return find()
            except StoreMiss:
                return None

        return Target(parse, (file.read_bytes(),))

    lines = place / "journal"
    with open_journal(JournalLocation(lines, "k")) as whole:
        for number in range(5):
            whole.append({"document": number, "scores": [0.5, number]})

    def journal() -> object:
        with open_journal(JournalLocation(lines, "k"), fits=lambda record: isinstance(record, dict)) as found:
            return found.records

    def texts(cases: Mapping[str, str | bytes]) -> tuple[bytes, ...]:
        found = (one if isinstance(one, bytes) else one.encode() for one in cases.values())
        return tuple(one for one in found if len(one) < 20_000)

    shards = {"weight_map": dict.fromkeys(SHAPES, "a.safetensors")}
    inline = {
        "name": "x",
        "recipe": parse_yaml(RECIPE, "r")[0],
        "evaluate": {"tasks": [{"task": "a", "guarded_by": "base", "max_drop": 3}]},
    }
    everything = {
        **inline,
        "perplexity": {"documents": "d", "max_increase": "5%"},
        "remedies": [{"weight": 0.3}],
        "publish": {"to": "directory", "path": "out"},
    }
    line = json.dumps(sample_lines(1)[0])
    result = (place / "results" / f"results_{DATE}.json").read_bytes()
    every_line = (place / "samples" / f"samples_letters_{DATE}.jsonl").read_bytes()

    def target(parse: Callable[[bytes], object], *seeds: object) -> Target:
        """Return a target; seeds other than bytes or text are written as JSON."""
        texts_or_json = (one if isinstance(one, (bytes, str)) else json.dumps(one) for one in seeds)
        return Target(parse, tuple(one if isinstance(one, bytes) else one.encode() for one in texts_or_json))

    parts = ("samples", "reductions")
    group = "group: g\ntask: [{task: a, dataset_path: b}, {group: h, task: [x]}]\n"
    unigram = {"model": {"vocab": [["a", 0.5], ["b", 1]]}}
    template = {"chat_template": "{{ a }}", "tokenizer_class": "A"}
    read_card = "---\nlicense: apache-2.0\nbase_model: [a/b, c/d]\nlanguage: [en]\n---\n# x\n"
    module = "import os\nfrom . import a\nfrom b.c import d as e\n\ndef f(x):\n    return [y for y in x]\n"
    definition, code = place / "task" / "task.yaml", place / "task" / "f.py"
    of_one = b"}" + corpus.text("model.norm.weight") + corpus.tensor() + b"s"
    found = {
        "header": target(header, safetensors()),
        "gguf": target(gguf_header, gguf(), gguf({}, [("a", F32, (4, 4)), ("b", Q8_0, (2, 32))])),
        "index": target(
            reads(place / "index" / "model.safetensors.index.json", lambda: open_checkpoint(place / "index")), shards
        ),
        "config": target(of_checkpoint("config.json", planned=True), CONFIG, {"text_config": CONFIG}),
        "tokenizer": target(reads(place / "tokens" / "tokenizer.json", tokens), TOKENIZER, unigram),
        "tokenizer config": target(of_checkpoint("tokenizer_config.json"), template),
        "chat template": target(of_checkpoint("chat_template.jinja"), "{% for m in messages %}{{ m }}{% endfor %}"),
        "card": target(reads(place / "card" / "README.md", card), read_card),
        "recipe": target(a_recipe, RECIPE, parse_yaml(RECIPE, "r")[0], *texts(corpus.RECIPES)),
        "reference": target(reference, "./base", "org/name@main+org/adapter@v1", "~/x", "/tmp/../x"),
        "profile": target(profile, PROFILE, inline, everything, *texts(corpus.PROFILES)),
        "task": target(reads(definition, lambda: task_tree(definition)), TASK, parse_yaml(TASK, "t")[0], group),
        "task code": target(reads(code, lambda: local_imports(code, place / "task")), module),
        "zip": target(a_pickle, torch_weights(), corpus.shared_header(), corpus.many_members()),
        "pickle": target(description, of_one),
        "results": target(of_results("results", f"results_{DATE}.json"), result),
        "samples": target(of_results("samples", f"samples_letters_{DATE}.jsonl"), line, every_line),
        "inspect log": target(log, inspect_log()),
        "inspect export": target(log, exported_log()),
        "inspect zip": target(lambda data: log(data, "log.eval"), eval_log()),
        "inspect header": target(log_part("header"), {n: v for n, v in inspect_log().items() if n not in parts}),
        "inspect sample": target(log_part("sample"), inspect_log()["samples"][0]),
        "inspect reductions": target(log_part("reductions"), inspect_log()["reductions"]),
        "manifest": of_store(kept.directory("made", made) / MANIFEST, lambda: kept.open("made", made, Note)),
        "artifact's value": of_store(kept.directory("made", made) / VALUE, lambda: kept.open("made", made, Note)),
        "value": of_store(kept.root / "said" / f"{said[:32]}.json", lambda: kept.open_value("said", said, Note)),
        "journal": of_store(lines, journal),
        "line": target(lambda data: parse_line(data, PLACE, 1), {"text": "a", "turns": ["b"]}),
    }
    for name in sorted(held):
        if name.endswith((".json", ".yaml", "README.md", "SHA256SUMS", ".sig")) and not name.startswith("report"):
            found[f"release: {name}"] = Target(of_release(name), (held[name],))
    return found


@contextmanager
def limited() -> Iterator[None]:
    """Interrupt executions that take too long."""

    def too_long(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"over {SLOW} s")

    old = signal.signal(signal.SIGPROF, too_long)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


def turns(known: Mapping[str, Target], found: Found, random: Random) -> list[str]:
    """Return the next targets to execute; cheaper ones come more often, but each comes now and then."""
    if min((found.by_target[name] for name in known), default=0) < 20:
        return list(known)
    often = {name: (found.by_target[name] / max(found.costs[name], 1e-6)) ** 0.5 for name in known}
    return random.choices(list(often), list(often.values()), k=500)


def fuzz(known: Mapping[str, Target], *, executions: int, seconds: float, seed: int) -> Found:
    """Execute the targets until `executions` or `seconds` is reached, cheaper ones more often."""
    random, found, started = Random(seed), Found(), time.monotonic()
    every = tuple(one for target in known.values() for one in target.seeds)
    with limited():
        while found.executions < executions and time.monotonic() - started < seconds:
            for name in turns(known, found, random):
                target, before = known[name], time.process_time()
                data = mutated(random.choice(target.seeds), every, random)
                signal.setitimer(signal.ITIMER_PROF, SLOW)
                try:
                    target.parse(data)
                    found.values += 1
                except MergegateError as error:
                    str(error).encode()
                except Exception:
                    found.failures.append((name, data, traceback.format_exc(limit=-4)))
                found.executions += 1
                if found.executions % 50_000 == 0:
                    took = time.monotonic() - started
                    print(
                        f"{found.executions} in {took:.0f} s, {len(found.failures)} found", file=sys.stderr, flush=True
                    )
                found.by_target[name] += 1
                found.costs[name] += time.process_time() - before
    found.seconds = time.monotonic() - started
    return found


def published(place: Path) -> Path:
    """Publish a release with mergegate; starting Prefect's API takes some seconds."""
    from honest import release

    from mergegate.flows.prefect_api import configure, local_api

    configure(place / "home")
    with local_api():
        return release(place)


def main() -> int:
    """Fuzz as the command line specifies, and return 1 if anything was found."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--executions", type=int, default=1_000_000)
    arguments.add_argument("--seconds", type=float, default=float("inf"))
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--only", help="targets whose names begin so", default="")
    asked = arguments.parse_args()
    logging.disable(logging.WARNING)  # Each distrusted cache entry is a miss and would be logged.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="mergegate-fuzz-") as scratch:
        known = targets(Path(scratch) / "inputs", published(Path(scratch) / "release"))
        chosen = {name: target for name, target in known.items() if name.startswith(asked.only)}
        found = fuzz(chosen, executions=asked.executions, seconds=asked.seconds, seed=asked.seed)
    for name, count in found.by_target.items():
        print(f"{count:>9}  {name}")
    print(f"{found.executions} executions in {found.seconds:.0f} s ({found.executions / found.seconds:.0f} a second)")
    print(f"{found.values} ended in a value, {found.executions - found.values - len(found.failures)} in a message")
    shutil.rmtree(HERE / "found", ignore_errors=True)
    seen = set()
    for number, (name, data, said) in enumerate(found.failures):
        kind = (name, said.splitlines()[-1][:60])
        if kind in seen:
            continue
        seen.add(kind)
        (HERE / "found").mkdir(exist_ok=True)
        (HERE / "found" / f"{number:06d}").write_bytes(data)
        print(f"--- {name}: found/{number:06d}: {data[:80]!r}\n{said}")
    print(f"{len(found.failures)} ended otherwise")
    return 1 if found.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
