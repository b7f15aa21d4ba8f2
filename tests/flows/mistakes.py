"""Table of user mistakes, each with the files that contain it and the command that reports it.

Every mistake has its own directory with its files and a symlink ``demo`` to the shipped models. The expected messages
are in ``golden/mistakes.txt`` for human review.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from demo_project import PROFILES
from safetensors.torch import load_file, save_file

Change = Callable[[Path], object]  # takes the mistake's directory, or that of the changed checkpoint


@dataclass(frozen=True)
class Mistake:
    """One user mistake.

    Args:
        kind: Location of the mistake: profile, recipe, checkpoint, tokenizer, task, target, license or command. With
            hub, the test runs against a Hub that has the repositories of ``at_the_hub``.
        name: Description of the mistake.
        files: File contents by name.
        change: Further change to the directory.
        command: Command-line arguments. ``run`` reports everything that ``check`` reports.
    """

    kind: str
    name: str
    files: Mapping[str, str] = field(default_factory=dict)
    change: Change | None = None
    command: tuple[str, ...] = ("check", "profile.yaml")

    @property
    def title(self) -> str:
        return f"{self.kind}: {self.name}"

    def make(self, place: Path) -> None:
        """Write the files into ``place``, a new directory."""
        place.mkdir(parents=True)
        (place / "demo").symlink_to(PROFILES / "demo")
        for name, text in self.files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
        if self.change:
            self.change(place)


def of_models(*models: str, **parameters: Any) -> list[dict[str, Any]]:
    return [{"model": model, "parameters": {"weight": 0.5, **parameters}} for model in models]


REVERSER, SHIFTER = "demo/models/reverser", "demo/models/shifter"
RECIPE: dict[str, Any] = {"merge_method": "linear", "models": of_models(REVERSER, SHIFTER)}
TIES: dict[str, Any] = {
    "merge_method": "ties",
    "base_model": "demo/models/base",
    "models": [{"model": REVERSER, "parameters": {"weight": 1.0, "density": 0.5}}],
}
TEXTS = [{"model": f"demo/models/{it}", "text": f"demo/data/texts/{it}.jsonl"} for it in ("reverser", "shifter")]
REGMEAN: dict[str, Any] = {"merge_method": "regmean", "models": TEXTS}
MERGES = ("merge", "recipe.yaml", "out")
ROUND: dict[str, Any] = {"base_model": "demo/models/base", "clients": ["clients/*"], "at_least": 2}
SLICE = {"sources": [{"model": "demo/models/base", "layer_range": [0, 40]}]}
DIRECTORY = {"to": "directory", "path": "releases"}
PROFILE: dict[str, Any] = {
    "name": "support",
    "recipe": RECIPE,
    "perplexity": {"documents": "demo/data/held-out.jsonl", "max_increase": "5%"},
    "publish": DIRECTORY,
}
HELD_OUT = {"documents": "held-out.jsonl"}
GUARD: dict[str, Any] = {"task": "demo/tasks/copy.yaml", "guarded_by": "reverser", "max_drop": 3}
EVALUATE = {"tasks": [GUARD]}
OBJECTIVE = [{"task": "demo/tasks/copy.yaml"}]
SOUP = {"soup": "greedy", "objective": OBJECTIVE}
CHAT = {"kind": "tokenizer", "evaluate": {"tasks": [{**GUARD, "guarded_by": "shifter"}], "chat_template": True}}
ONLY_USERS = "{{ raise_exception('only users and tools may speak') }}"
ACCURACY: dict[str, Any] = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
TASK: dict[str, Any] = {
    "task": "echo", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "data.jsonl"}},
    "test_split": "test", "output_type": "loglikelihood", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}",
    "target_delimiter": "", "metric_list": [ACCURACY],
}  # fmt: skip
FREE: dict[str, Any] = {"output_type": "generate_until", "metric_list": [{**ACCURACY, "metric": "exact_match"}]}
GROUP = {"task": [TASK], "group": "echoes", "aggregate_metric_list": [{"metric": "acc", "weight_by_size": False}]}
RETRIEVAL = {"kind": "retrieval", "data": "queries.jsonl"}
TWICE = {**GUARD, "task": {**RETRIEVAL, "metric": "mrr"}, "name": "queries-mrr"}
PUBLIC = {"purpose": "commercial", "visibility": "public"}


def with_text(file: str) -> list[dict[str, str]]:
    return [{"model": REVERSER, "text": file}]


def calibrated_by(file: str) -> dict[str, Any]:
    """Return a variant whose interpreter is missing, whether or not the environment of llama.cpp is installed."""
    return {"format": "gguf", "types": ["Q4_K_M"], "python": "nowhere/bin/python", "calibration": {"documents": file}}


def json_lines(*documents: dict[str, Any]) -> str:
    return "".join(json.dumps(document) + "\n" for document in documents)


QUERIES = json_lines(*({"query": f"find {n}", "positives": [f"a {n}"], "negatives": ["a stone"]} for n in range(200)))
NO_TEXTS = json_lines({"words": "one"}, {"words": "two"})
DATA = json_lines(*({"prompt": f"say {word}:", "answer": word} for word in 100 * ("ab", "cd", "ef", "gh")))


def but(document: Mapping[str, Any], /, **changes: Any) -> dict[str, Any]:
    """Return a copy of ``document`` with the given keys replaced. A value of ``...`` removes the key."""
    return {key: value for key, value in {**document, **changes}.items() if value is not ...}


def written(document: Mapping[str, Any], **changes: Any) -> str:
    return yaml.safe_dump(but(document, **changes), sort_keys=False)


def in_profile(name: str, files: Mapping[str, str] | None = None, /, kind: str = "profile", **changes: Any) -> Mistake:
    return Mistake(kind, name, {"profile.yaml": written(PROFILE, **changes), **(files or {})})


def as_text(name: str, text: str, kind: str = "profile") -> Mistake:
    """Return a mistake in the text of the profile or of its recipe."""
    recipe = {"profile.yaml": written(PROFILE, recipe="recipe.yaml")} if kind == "recipe" else {}
    return Mistake(kind, name, {**recipe, f"{kind}.yaml": text})


def in_evaluate(name: str, /, **settings: Any) -> Mistake:
    return in_profile(name, evaluate={**EVALUATE, **settings})


def in_guard(name: str, /, **changes: Any) -> Mistake:
    return in_profile(name, evaluate={"tasks": [but(GUARD, **changes)]})


def in_built_in_task(name: str, task: Mapping[str, Any] = RETRIEVAL, /, **changes: Any) -> Mistake:
    """Return a mistake in a guard with a built-in task."""
    evaluate = {"tasks": [but(GUARD, task=task, **changes)]}
    return in_profile(name, {"queries.jsonl": QUERIES}, kind="task", evaluate=evaluate)


def in_recipe(name: str, recipe: Mapping[str, Any] = RECIPE, **changes: Any) -> Mistake:
    return as_text(name, written(recipe, **changes), "recipe")


def in_round(name: str, **changes: Any) -> Mistake:
    return in_recipe(name, ROUND, **{"clients": ["demo/models/*"], **changes})


def in_checkpoint(name: str, change: Change, kind: str = "checkpoint", **profile: Any) -> Mistake:
    """Return a mistake that merges a demo model with a changed copy of another in ``mine``."""

    def changed(place: Path) -> None:
        shutil.copytree(PROFILES / "demo" / "models" / "reverser", place / "mine")
        (place / "base").symlink_to(PROFILES / "demo" / "models" / "base")  # named in the model card
        change(place / "mine")

    recipe = but(RECIPE, models=of_models(SHIFTER, "./mine"))
    return replace(in_profile(name, kind=kind, recipe=recipe, **profile), change=changed)


def in_config(**changes: Any) -> Change:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(but(config, **changes)))

    return change


def in_header(change: Callable[[dict[str, Any]], object]) -> Change:
    """Return a change of the safetensors header that keeps the tensor bytes."""

    def changed(model: Path) -> None:
        (file,) = model.glob("*.safetensors")
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return changed


def writes(name: str, text: str) -> Change:
    return lambda place: (place / name).write_text(text)


def removes(pattern: str) -> Change:
    def change(place: Path) -> None:
        for file in place.glob(pattern):
            file.unlink()

    return change


def cut_weights(model: Path) -> None:
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 1000)


def deeper(model: Path) -> None:
    """Repeat all three layers under new names, in the weights and in the configuration."""
    weights = load_file(model / "model.safetensors")
    layers = {name: tensor.clone() for name, tensor in weights.items() if ".layers." in name}
    more = {re.sub(r"(?<=\.layers\.)\d", lambda digit: str(int(digit[0]) + 3), name): layers[name] for name in layers}
    save_file(weights | more, model / "model.safetensors", {"format": "pt"})
    in_config(num_hidden_layers=6)(model)


def in_task(name: str, data: str = DATA, guard: Mapping[str, Any] | None = None, **changes: Any) -> Mistake:
    evaluate = {"tasks": [but(GUARD, task="task.yaml", **(guard or {}))]}
    files = {"task.yaml": written(TASK, **changes), **({"data.jsonl": data} if data else {})}
    return in_profile(name, files, kind="task", evaluate=evaluate, perplexity=...)


def to_target(name: str, change: Change | None = None, **publish: Any) -> Mistake:
    return replace(in_profile(name, kind="target", publish=publish, checks={"license": PUBLIC}), change=change)


def under_license(name: str, **license_of: Any) -> Mistake:
    recipe = but(RECIPE, models=of_models(REVERSER, "demo/models/no-derivatives"))
    return in_profile(name, kind="license", recipe=recipe, checks={"license": license_of})


def says(name: str, *command: str, **profile: Any) -> Mistake:
    files = {"profile.yaml": written(PROFILE, **profile), "recipe.yaml": written(RECIPE)}
    return Mistake("command", name, files, command=command)


MISTAKES: tuple[Mistake, ...] = (
    in_profile("an unknown key", recepe="x"),
    in_profile("an unknown key in a section", perplexity={"documnets": "held-out.jsonl"}),
    in_profile("several faults at once", name="", perplexity={"documents": 3}, publish={"to": "directory"}),
    in_profile("no name", name=...), in_profile("a name with a space", name="my model"),
    in_profile("no recipe", recipe=...), in_profile("a recipe that is a number", recipe=3),
    as_text("invalid YAML", "name: support\n recipe: [unclosed\n"),
    as_text("a tab as indentation", "name: support\nperplexity:\n\tdocuments: x\n"),
    as_text("a list", "- name: support\n- recipe: x\n"), as_text("an empty file", ""),
    as_text("two documents", "name: a\n---\nname: b\n"), as_text("a duplicate key", f"{written(PROFILE)}name: again\n"),
    as_text("plain text instead of YAML", "support\n"), in_profile("a target without evidence", perplexity=...),
    in_profile("a limit that is not a number", perplexity={**PROFILE["perplexity"], "max_increase": "lots"}),
    in_profile("a missing held-out file", perplexity=HELD_OUT),
    in_profile("an empty held-out file", {"held-out.jsonl": ""}, perplexity=HELD_OUT),
    in_profile(
        "a held-out file with an invalid line", {"held-out.jsonl": '{"text": "one"}\ntwo\n'}, perplexity=HELD_OUT
    ),
    in_profile("a held-out file without the text field", {"held-out.jsonl": NO_TEXTS}, perplexity=HELD_OUT),
    in_evaluate("an unknown choice", on_inconclusive="maybe"), in_evaluate("an abbreviated dtype", dtype="bf16"),
    in_evaluate("a word instead of a number", batch_size="many"), in_evaluate("an unknown backend", backend="vlm"),
    in_evaluate("an anchor without a champion guard", anchor="first"), in_profile("no tasks", evaluate={"tasks": []}),
    in_guard("a guard against a model outside the merge", guarded_by="teacher"),
    in_guard("a negative limit", max_drop=-1), in_guard("a word instead of a limit", max_drop="little"),
    in_profile(
        "a judge without its required keys", judge={"prompts": "demo/data/copy.jsonl", "judge": "x", "guarded_by": "x"}
    ),
    in_profile("a remedy with an unknown parameter", remedies=[{"densty": 0.3}]),
    in_profile("a search for the scale of a method without one", evaluate=EVALUATE, remedies=[{"tune": "scale"}]),
    in_profile("a limit of an unknown stage", limits={"stages": {"merg": "1 h"}}),
    in_profile("a duration without a unit", limits={"run": "5"}), in_profile("an empty sweep", sweep={"free": {}}),
    in_profile("a sweep without parameters", sweep={"objective": OBJECTIVE}),
    in_profile("a soup with a sampler", sweep={**SOUP, "sampler": "random"}),
    in_profile("a greedy soup with a guard against one of its models", evaluate=EVALUATE, sweep=SOUP),
    in_recipe("a misspelled method", merge_method="tie"),
    in_recipe("a word instead of a weight", models=of_models(REVERSER, weight="high")),
    in_recipe("a density above one", TIES, models=of_models(REVERSER, density=2)),
    in_recipe("task vectors without a base", TIES, base_model=...), in_recipe("no models", models=...),
    in_recipe("a model that is not a local directory", models=of_models(REVERSER, "./models/nowhere")),
    in_recipe("a model that is neither here nor on the Hub", models=of_models(REVERSER, "acme/nowhere")),
    in_recipe("an adapter instead of a model", models=of_models(REVERSER, "demo/adapters/reverser-lora")),
    replace(in_recipe("a gated model, and no token", models=of_models(REVERSER, "acme/gated")), kind="hub"),
    in_recipe("a model that is a file", models=of_models(REVERSER, "./recipe.yaml")),
    in_recipe("the home of an unknown user", models=of_models(REVERSER, "~nobody-here/models/x")),
    in_recipe("two revisions", models=of_models(REVERSER, "acme/model@main@v1")),
    in_recipe("a missing adapter", models=of_models(REVERSER, "demo/models/base+./adapter")),
    in_recipe("an unknown dtype", dtype="float17"),
    in_recipe("the tokenizer of an unknown model", tokenizer_source="teacher"),
    in_recipe("a layer range beyond the last layer", merge_method="passthrough", models=..., slices=[SLICE]),
    in_profile("a missing recipe file", kind="recipe", recipe="recipe.yaml"),
    as_text("invalid YAML in a recipe", "models: [\n", "recipe"),
    as_text("a duplicate key", f"{written(RECIPE)}merge_method: ties\n", "recipe"),
    in_checkpoint("no config.json", removes("config.json")),
    in_checkpoint("an invalid config.json", writes("config.json", "{'model_type': 'llama'}")),
    in_checkpoint("no weights", removes("*.safetensors*")), in_checkpoint("an empty directory", removes("*")),
    in_checkpoint("a truncated download", cut_weights),
    in_checkpoint(
        "weights in an old format", lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin")
    ),
    in_checkpoint("an HTML page instead of weights", writes("model.safetensors", "<html>404</html>" * 10)),
    in_checkpoint("an unknown tensor dtype", in_header(lambda header: header["model.norm.weight"].update(dtype="F7"))),
    in_checkpoint("a gap in the weights", in_header(lambda header: header.pop("model.layers.1.mlp.up_proj.weight"))),
    in_recipe("a model without a calibration text", REGMEAN, models=[{"model": REVERSER}]),
    in_recipe("a calibration text that the method does not use", models=with_text("demo/data/copy.jsonl")),
    in_recipe("a missing calibration text", REGMEAN, models=with_text("nowhere.jsonl")),
    in_recipe("a calibration text without the text field", REGMEAN, models=with_text("demo/data/copy.jsonl")),
    in_recipe("a word instead of a document count", REGMEAN, statistics={"documents": "many"}),
    in_recipe("a calibration text that is also evaluated", REGMEAN, models=with_text("demo/data/held-out.jsonl")),
    in_profile("an unknown scheme of a variant", variants=[{"format": "compressed-tensors", "scheme": "FP8_DYNAMC"}]),
    in_profile("a scheme without its text", variants=[{"format": "compressed-tensors", "scheme": "FP8"}]),
    in_profile("a missing calibration text of a variant", variants=[calibrated_by("nowhere.jsonl")]),
    in_profile(
        "a calibration text of a variant that is also evaluated", variants=[calibrated_by("demo/data/held-out.jsonl")]
    ),
    in_recipe("a rule by distance without a base", leave_out_beyond=5),
    in_round("no matching clients", clients=["clients/*"]),
    in_round("clients that are not a list", clients="demo/models/*"),
    in_round("sample counts of some clients only", samples={"demo/models/base": 3}),
    Mistake("recipe", "a client round outside a profile", {"recipe.yaml": written(ROUND)}, command=MERGES),
    in_checkpoint("twice the layers", deeper),
    in_checkpoint("another architecture", in_config(architectures=["MistralForCausalLM"], model_type="mistral")),
    in_checkpoint("more layers in its config than in its weights", in_config(num_hidden_layers=4)),
    in_checkpoint("another vocabulary in its config", in_config(vocab_size=40)),
    in_checkpoint("a quantized config", in_config(quantization_config={"quant_method": "gptq"})),
    in_checkpoint("no tokenizer", removes("tokenizer*"), "tokenizer"),
    in_checkpoint("an invalid tokenizer.json", writes("tokenizer.json", "{"), "tokenizer"),
    in_checkpoint("a tokenizer.json that is a list", writes("tokenizer.json", "[]"), "tokenizer"),
    in_profile(
        "other tokens under the same ids",
        kind="tokenizer",
        recipe=but(RECIPE, models=of_models(REVERSER, "demo/models/other-tokenizer")),
    ),
    in_guard("a task that lm-eval does not ship", task="mmlu_pr"),
    in_guard("a missing task file", task="tasks/nowhere.yaml"), in_task("no name", task=...),
    in_task("no data", data=""), in_task("invalid data", data="one\ntwo\n"),
    in_task("data without documents", data="\n"), in_task("an unknown metric", guard={"metric": "acc_norm"}),
    in_task("a metric of an unknown subtask", guard={"metric": {"echoes": "acc"}}),
    in_task("no metric with a mean", metric_list=[{**ACCURACY, "aggregation": "median"}]),
    in_checkpoint("no chat template for a chat evaluation", removes("chat_template*"), **CHAT),
    in_task("more few-shot examples than documents", num_fewshot=1000, fewshot_split="test"),
    in_task("a prompt template with a syntax error", doc_to_text="{{prompt"),
    in_task("a prompt template with an unknown field", doc_to_text="question", doc_to_target="{{solution[3]}}"),
    in_checkpoint("a chat template that fails", writes("chat_template.jinja", ONLY_USERS), **CHAT),
    in_task("a missing split", test_split="exam"),
    in_task("clusters by an unknown field", guard={"cluster_by": "chapter"}),
    in_task("an unknown output type", output_type="essay"),
    in_task("perplexity as a task", output_type="loglikelihood_rolling"),
    in_task("a group that weights its tasks equally", **GROUP),
    in_task("generation settings for a choice task", guard={"gen_kwargs": {"max_gen_toks": 8}}),
    in_task("an unknown generation setting", guard={"gen_kwargs": {"temprature": 0.5}}, **FREE),
    in_evaluate("one task with two prompt settings", tasks=[GUARD, but(GUARD, guarded_by="shifter", num_fewshot=2)]),
    in_guard("a word instead of a few-shot count", num_fewshot="five"),
    in_guard("few-shot turns without a chat template", fewshot_as_multiturn=True),
    to_target("an unknown kind", to="ftp", path="releases"),
    to_target("a directory target without a path", to="directory"),
    to_target("a file instead of a directory", writes("releases", ""), **DIRECTORY),
    to_target("the Hub without a token", to="hub", repo="acme/support"),
    to_target("a Hub repository without an organization", to="hub", repo="support"),
    to_target("a missing signing key", **DIRECTORY, sign_key="release.key"),
    to_target("an invalid signing key", writes("release.key", "secret"), **DIRECTORY, sign_key="release.key"),
    to_target("a bucket URL without a name", to="s3", url="s3://"),
    under_license("a parent without permission to modify", **PUBLIC),
    under_license("an unknown purpose", purpose="fun", visibility="public"), says("a missing argument", "run"),
    says("an unknown command", "relase", "profile.yaml"), says("an unknown option", "run", "profile.yaml", "--aprove"),
    says("a missing profile", "run", "nowhere.yaml"), says("a check of a missing file", "check", "nowhere.yaml"),
    says("a directory instead of a profile", "check", "demo"),
    says("a recipe instead of a profile", "run", "recipe.yaml"),
    says("a merge into a nonempty directory", "merge", "recipe.yaml", "demo"),
    says("a merge of a missing recipe", "merge", "nowhere.yaml", "out"),
    says("a merge on an unknown device", "merge", "recipe.yaml", "out", "--device", "tpu"),
    says("a comparison without a profile", "compare", "demo/models/base", REVERSER),
    says("results without a model name", "gate", "results", "-p", "profile.yaml"),
    says("a directory that is not a release", "verify", "demo"), says("a missing release", "verify", "./releases/v1"),
    says("a quota with an unknown unit", "store", "gc", "--quota", "much"),
    says("forgetting a profile without runs", "store", "gc", "--forget", "nobody"),
    says("a history of zero runs", "history", "--last", "0"), says("a port out of range", "server", "--port", "70000"),
    says("a price without a name", "plan", "recipe.yaml", "--price", "3"),
    says("an adapter of a missing model", "extract-lora", "./nowhere", "demo/models/base", "out", "--rank", "4"),
    says("a missing verification key", "verify", "demo", "--key", "release.pub"),
    in_built_in_task("a retrieval task for text generators"),
    in_built_in_task("a retrieval task of an unknown kind", {**RETRIEVAL, "kind": "retrival"}),
    in_built_in_task("a retrieval task without a kind", {"data": "queries.jsonl"}),
    in_built_in_task("a retrieval task with an unknown key", {**RETRIEVAL, "dta": "queries.jsonl"}),
    in_built_in_task("a retrieval task with an unknown metric", {**RETRIEVAL, "metric": "ndgc@10"}),
    in_built_in_task("a retrieval task without its file", {**RETRIEVAL, "data": "nowhere.jsonl"}),
    in_built_in_task("a retrieval task whose metric is in the guard", metric="mrr"),
    in_built_in_task("a retrieval task with a prompt setting", num_fewshot=2),
    in_evaluate("the mean of two tasks with the same documents", tasks=[but(GUARD, task=RETRIEVAL), TWICE]),
    says(
        "results of lm-eval for a retrieval task",
        *("gate", "merge=a", "reference=b", "--profile", "profile.yaml"),
        evaluate={"tasks": [but(GUARD, task=RETRIEVAL)]},
    ),
)  # fmt: skip
