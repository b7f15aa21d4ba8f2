"""Table of user mistakes, each with the files that contain it and the command that reports it.

Every mistake has its own directory with its files and a symlink ``demo`` to the shipped models. The expected messages
are in ``golden/mistakes.txt`` for human review.
"""

from __future__ import annotations

import copy
import json
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from demo_project import PROFILES

Files = Mapping[str, str]
Change = Callable[[Path], None]  # takes the mistake's directory


def nothing(_: Path) -> None:
    """Change nothing."""


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
    files: Files
    change: Change = nothing
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
        self.change(place)


RECIPE: dict[str, Any] = {
    "merge_method": "linear",
    "models": [
        {"model": "demo/models/reverser", "parameters": {"weight": 0.5}},
        {"model": "demo/models/shifter", "parameters": {"weight": 0.5}},
    ],
}
TIES: dict[str, Any] = {
    "merge_method": "ties",
    "base_model": "demo/models/base",
    "models": [{"model": "demo/models/reverser", "parameters": {"weight": 1.0, "density": 0.5}}],
}
# The interpreter is missing on every machine, whether or not the environment of llama.cpp is installed.
GGUF: dict[str, Any] = {"format": "gguf", "types": ["Q4_K_M"], "python": "nowhere/bin/python"}
REGMEAN: dict[str, Any] = {
    "merge_method": "regmean",
    "models": [
        {"model": "demo/models/reverser", "text": "demo/data/texts/reverser.jsonl"},
        {"model": "demo/models/shifter", "text": "demo/data/texts/shifter.jsonl"},
    ],
}
ROUND: dict[str, Any] = {"base_model": "demo/models/base", "clients": ["clients/*"], "at_least": 2}
MERGES = ("merge", "recipe.yaml", "out")
PROFILE: dict[str, Any] = {
    "name": "support",
    "recipe": RECIPE,
    "perplexity": {"documents": "demo/data/held-out.jsonl", "max_increase": "5%"},
    "publish": {"to": "directory", "path": "releases"},
}
GUARD: dict[str, Any] = {"task": "demo/tasks/copy.yaml", "guarded_by": "reverser", "max_drop": 3}
IN_MESSAGES: dict[str, Any] = {"tasks": [{**GUARD, "guarded_by": "shifter"}], "chat_template": True}
TASK: dict[str, Any] = {
    "task": "echo",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "data.jsonl"}},
    "test_split": "test",
    "output_type": "loglikelihood",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
F1: dict[str, Any] = {"metric": "f1", "aggregation": "mean", "higher_is_better": True}
FREE: dict[str, Any] = {
    "output_type": "generate_until",
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
GROUP: dict[str, Any] = {
    "task": [TASK],
    "group": "echoes",
    "aggregate_metric_list": [{"metric": "acc", "weight_by_size": False}],
}
RETRIEVAL = {"kind": "retrieval", "data": "queries.jsonl"}
TWICE = {**GUARD, "task": {**RETRIEVAL, "metric": "mrr"}, "name": "queries-mrr"}
QUERIES = "".join(
    json.dumps({"query": f"find {number}", "positives": [f"a {number}"], "negatives": ["a stone"]}) + "\n"
    for number in range(200)
)
DATA = "".join(json.dumps({"prompt": f"say {word}:", "answer": word}) + "\n" for word in 100 * ("ab", "cd", "ef", "gh"))


def but(document: Mapping[str, Any], /, **changes: Any) -> dict[str, Any]:
    """Return a copy of ``document`` with the given keys replaced. A value of ``...`` removes the key."""
    changed = {**copy.deepcopy(dict(document)), **changes}
    return {key: value for key, value in changed.items() if value is not ...}


def written(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(document), sort_keys=False)


def in_profile(title: str, /, **changes: Any) -> Mistake:
    return Mistake("profile", title, {"profile.yaml": written(but(PROFILE, **changes))})


def as_text(name: str, text: str) -> Mistake:
    return Mistake("profile", name, {"profile.yaml": text})


def in_evaluate(name: str, /, **settings: Any) -> Mistake:
    return in_profile(name, evaluate={"tasks": [GUARD], **settings})


def in_guard(name: str, /, **changes: Any) -> Mistake:
    return in_profile(name, evaluate={"tasks": [but(GUARD, **changes)]})


def in_built_in_task(name: str, task: Mapping[str, Any] = RETRIEVAL, /, **changes: Any) -> Mistake:
    """Return a mistake in a guard with a built-in task."""
    mistake = in_profile(name, evaluate={"tasks": [but(GUARD, task=dict(task), **changes)]})
    return replace(mistake, kind="task", files={**mistake.files, "queries.jsonl": QUERIES})


def in_recipe(name: str, recipe: Mapping[str, Any] = RECIPE, **changes: Any) -> Mistake:
    files = {
        "profile.yaml": written(but(PROFILE, recipe="recipe.yaml")),
        "recipe.yaml": written(but(recipe, **changes)),
    }
    return Mistake("recipe", name, files)


def of_models(*models: str, **parameters: Any) -> list[dict[str, Any]]:
    return [{"model": model, "parameters": {"weight": 0.5, **parameters}} for model in models]


def with_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ raise_exception('only users and tools may speak') }}")


def in_checkpoint(name: str, change: Change, kind: str = "checkpoint", **profile: Any) -> Mistake:
    """Return a mistake that merges a demo model with a changed copy of another in ``mine``."""

    def changed(place: Path) -> None:
        shutil.copytree(PROFILES / "demo" / "models" / "reverser", place / "mine")
        (place / "base").symlink_to(PROFILES / "demo" / "models" / "base")  # named in the model card
        change(place / "mine")

    recipe = but(RECIPE, models=of_models("demo/models/shifter", "./mine"))
    return Mistake(kind, name, {"profile.yaml": written(but(PROFILE, recipe=recipe, **profile))}, changed)


def in_config(**changes: Any) -> Change:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(but(config, **changes)))

    return change


def in_header(change: Callable[[dict[str, Any]], None]) -> Change:
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
    def change(place: Path) -> None:
        (place / name).write_text(text)

    return change


def removes(pattern: str) -> Change:
    def change(place: Path) -> None:
        for file in place.glob(pattern):
            file.unlink()

    return change


def renamed(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def cut_weights(model: Path) -> None:
    (file,) = model.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])


def deeper(model: Path) -> None:
    """Double the depth of a model in its weights and configuration by repeating all layers under new names."""

    def change(header: dict[str, Any]) -> None:
        for name in [one for one in header if ".layers." in one]:
            head, _, rest = name.partition(".layers.")
            number, _, tail = rest.partition(".")
            header[f"{head}.layers.{int(number) + 3}.{tail}"] = header[name]

    # Only headers are read, so the added layers are zeros.
    (file,) = model.glob("*.safetensors")
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    begin = {name: one["data_offsets"] for name, one in header.items() if name != "__metadata__"}
    end = max(stop for _, stop in begin.values())
    more = b""
    for name, (first, stop) in list(begin.items()):
        if ".layers." in name:
            head, _, rest = name.partition(".layers.")
            number, _, tail = rest.partition(".")
            size = stop - first
            header[f"{head}.layers.{int(number) + 3}.{tail}"] = {
                **header[name],
                "data_offsets": [end + len(more), end + len(more) + size],
            }
            more += bytes(size)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :] + more)
    in_config(num_hidden_layers=6)(model)


def without_tensor(header: dict[str, Any]) -> None:
    header.pop("model.layers.1.mlp.up_proj.weight")


def as_bytes(header: dict[str, Any]) -> None:
    header["model.norm.weight"]["dtype"] = "F7"


def in_task(name: str, data: str = DATA, guard: Mapping[str, Any] | None = None, **changes: Any) -> Mistake:
    evaluate = {"tasks": [but(GUARD, task="task.yaml", **(guard or {}))]}
    return Mistake(
        "task",
        name,
        {
            "profile.yaml": written(but(PROFILE, evaluate=evaluate, perplexity=...)),
            "task.yaml": written(but(TASK, **changes)),
            **({"data.jsonl": data} if data else {}),
        },
    )


def to_target(name: str, change: Change = nothing, **publish: Any) -> Mistake:
    license_of = {"license": {"purpose": "commercial", "visibility": "public"}}
    document = but(PROFILE, publish=publish, checks=license_of)
    return Mistake("target", name, {"profile.yaml": written(document)}, change)


def under_license(name: str, model: str = "demo/models/no-derivatives", **license_of: Any) -> Mistake:
    recipe = but(RECIPE, models=of_models("demo/models/reverser", model))
    text = written(but(PROFILE, recipe=recipe, checks={"license": license_of}))
    return Mistake("license", name, {"profile.yaml": text})


def says(name: str, *command: str, files: Files | None = None, change: Change = nothing) -> Mistake:
    return Mistake(
        "command", name, files or {"profile.yaml": written(PROFILE), "recipe.yaml": written(RECIPE)}, change, command
    )


MISTAKES: tuple[Mistake, ...] = (
    in_profile("an unknown key", recepe="x"),
    in_profile("an unknown key in a section", perplexity={"documnets": "held-out.jsonl"}),
    in_profile("several faults at once", name="", perplexity={"documents": 3}, publish={"to": "directory"}),
    in_profile("no name", name=...),
    in_profile("a name with a space", name="my model"),
    in_profile("no recipe", recipe=...),
    in_profile("a recipe that is a number", recipe=3),
    as_text("invalid YAML", "name: support\n recipe: [unclosed\n"),
    as_text("a tab as indentation", "name: support\nperplexity:\n\tdocuments: x\n"),
    as_text("a list", "- name: support\n- recipe: x\n"),
    as_text("an empty file", ""),
    as_text("two documents", "name: a\n---\nname: b\n"),
    as_text("a duplicate key", f"{written(PROFILE)}name: again\n"),
    as_text("plain text instead of YAML", "support\n"),
    in_profile("a target without evidence", perplexity=...),
    in_profile(
        "a limit that is not a number", perplexity={"documents": "demo/data/held-out.jsonl", "max_increase": "lots"}
    ),
    in_profile("a missing held-out file", perplexity={"documents": "held-out.jsonl"}),
    Mistake(
        "profile",
        "an empty held-out file",
        {"profile.yaml": written(but(PROFILE, perplexity={"documents": "held-out.jsonl"})), "held-out.jsonl": ""},
    ),
    Mistake(
        "profile",
        "a held-out file with an invalid line",
        {
            "profile.yaml": written(but(PROFILE, perplexity={"documents": "held-out.jsonl"})),
            "held-out.jsonl": '{"text": "one"}\ntwo\n',
        },
    ),
    Mistake(
        "profile",
        "a held-out file without the text field",
        {
            "profile.yaml": written(but(PROFILE, perplexity={"documents": "held-out.jsonl"})),
            "held-out.jsonl": '{"words": "one"}\n{"words": "two"}\n',
        },
    ),
    in_evaluate("an unknown choice", on_inconclusive="maybe"),
    in_evaluate("an abbreviated dtype", dtype="bf16"),
    in_evaluate("a word instead of a number", batch_size="many"),
    in_evaluate("an unknown backend", backend="vlm"),
    in_evaluate("an anchor without a champion guard", anchor="first"),
    in_profile("no tasks", evaluate={"tasks": []}),
    in_guard("a guard against a model outside the merge", guarded_by="teacher"),
    in_guard("a negative limit", max_drop=-1),
    in_guard("a word instead of a limit", max_drop="little"),
    in_profile(
        "a judge without its required keys", judge={"prompts": "demo/data/copy.jsonl", "judge": "x", "guarded_by": "x"}
    ),
    in_profile("a remedy with an unknown parameter", remedies=[{"densty": 0.3}]),
    in_profile("a remedy after 'auto'", remedies=["auto", {"weight": 0.3}]),
    in_profile("a remedy that tunes something else than the scale", remedies=[{"tune": "density"}]),
    in_profile("a remedy after 'tune: scale'", remedies=[{"tune": "scale"}, {"density": 0.3}]),
    in_profile(
        "a search for the scale of a method without one",
        recipe=RECIPE,
        evaluate={"tasks": [GUARD]},
        remedies=[{"tune": "scale"}],
    ),
    in_profile("a limit of an unknown stage", limits={"stages": {"merg": "1 h"}}),
    in_profile("a duration without a unit", limits={"run": "5"}),
    in_profile("an empty sweep", sweep={"free": {}}),
    in_profile("a sweep without parameters", sweep={"objective": [{"task": "demo/tasks/copy.yaml"}]}),
    in_profile(
        "a soup with a sampler",
        sweep={"soup": "greedy", "sampler": "random", "objective": [{"task": "demo/tasks/copy.yaml"}]},
    ),
    in_profile(
        "a greedy soup with a guard against one of its models",
        recipe=RECIPE,
        evaluate={"tasks": [GUARD]},
        sweep={"soup": "greedy", "objective": [{"task": "demo/tasks/copy.yaml"}]},
    ),
    in_profile(
        "a soup of another method",
        recipe={**RECIPE, "merge_method": "karcher"},
        evaluate={"tasks": [{**GUARD, "guarded_by": "best parent"}]},
        sweep={"soup": "greedy", "objective": [{"task": "demo/tasks/copy.yaml"}]},
    ),
    in_recipe("a misspelled method", merge_method="tie"),
    in_recipe(
        "several faults and warnings at once",
        TIES,
        base_model=...,
        merge_methods="linear",
        dtype="float17",
        models=of_models("demo/models/reverser", "demo/models/shifter", weigth=1, density=2),
    ),
    in_recipe(
        "a word instead of a weight", models=[{"model": "demo/models/reverser", "parameters": {"weight": "high"}}]
    ),
    in_recipe("a density above one", TIES, models=of_models("demo/models/reverser", density=2)),
    in_recipe("task vectors without a base", TIES, base_model=...),
    in_recipe(
        "slerp with one model",
        merge_method="slerp",
        base_model="demo/models/reverser",
        models=[{"model": "demo/models/reverser"}],
        parameters={"t": 0.5},
    ),
    in_recipe("no models", models=...),
    in_recipe("a model that is not a local directory", models=of_models("demo/models/reverser", "./models/nowhere")),
    in_recipe("a model that is neither here nor on the Hub", models=of_models("demo/models/reverser", "acme/nowhere")),
    in_recipe("an adapter instead of a model", models=of_models("demo/models/reverser", "demo/adapters/reverser-lora")),
    replace(
        in_recipe("a gated model, and no token", models=of_models("demo/models/reverser", "acme/gated")), kind="hub"
    ),
    in_recipe("a model that is a file", models=of_models("demo/models/reverser", "./recipe.yaml")),
    in_recipe("the home of an unknown user", models=of_models("demo/models/reverser", "~nobody-here/models/x")),
    in_recipe("two revisions", models=of_models("demo/models/reverser", "acme/model@main@v1")),
    in_recipe("a missing adapter", models=of_models("demo/models/reverser", "demo/models/base+./adapter")),
    in_recipe("an unknown dtype", dtype="float17"),
    in_recipe("the tokenizer of an unknown model", tokenizer_source="teacher"),
    in_recipe(
        "a layer range beyond the last layer",
        merge_method="passthrough",
        models=...,
        slices=[{"sources": [{"model": "demo/models/base", "layer_range": [0, 40]}]}],
    ),
    Mistake("recipe", "a missing recipe file", {"profile.yaml": written(but(PROFILE, recipe="recipe.yaml"))}),
    Mistake(
        "recipe",
        "invalid YAML in a recipe",
        {"profile.yaml": written(but(PROFILE, recipe="recipe.yaml")), "recipe.yaml": "models: [\n"},
    ),
    Mistake(
        "recipe",
        "a duplicate key",
        {
            "profile.yaml": written(but(PROFILE, recipe="recipe.yaml")),
            "recipe.yaml": f"{written(RECIPE)}merge_method: ties\n",
        },
    ),
    in_checkpoint("no config.json", removes("config.json")),
    in_checkpoint("an invalid config.json", writes("config.json", "{'model_type': 'llama'}")),
    in_checkpoint("no weights", removes("*.safetensors*")),
    in_checkpoint("an empty directory", removes("*")),
    in_checkpoint("a truncated download", cut_weights),
    in_checkpoint("weights in an old format", renamed),
    in_checkpoint("an HTML page instead of weights", writes("model.safetensors", "<html>404</html>" * 10)),
    in_checkpoint(
        "a missing shard",
        writes(
            "model.safetensors.index.json",
            json.dumps({"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}),
        ),
    ),
    in_checkpoint("an unknown tensor dtype", in_header(as_bytes)),
    in_checkpoint("a gap in the weights", in_header(without_tensor)),
    in_recipe("a model without a calibration text", REGMEAN, models=[{"model": "demo/models/reverser"}]),
    in_recipe(
        "a calibration text that the method does not use",
        models=[{"model": "demo/models/reverser", "text": "demo/data/copy.jsonl"}],
    ),
    in_recipe(
        "a missing calibration text", REGMEAN, models=[{"model": "demo/models/reverser", "text": "nowhere.jsonl"}]
    ),
    in_recipe(
        "a calibration text without the text field",
        REGMEAN,
        models=[{"model": "demo/models/reverser", "text": "demo/data/copy.jsonl"}],
    ),
    in_recipe("a word instead of a document count", REGMEAN, statistics={"documents": "many"}),
    in_recipe(
        "a calibration text that is also evaluated",
        REGMEAN,
        models=[{"model": "demo/models/reverser", "text": "demo/data/held-out.jsonl"}],
    ),
    in_profile("an unknown scheme of a variant", variants=[{"format": "compressed-tensors", "scheme": "FP8_DYNAMC"}]),
    in_profile("a scheme without its text", variants=[{"format": "compressed-tensors", "scheme": "FP8"}]),
    in_profile(
        "a missing calibration text of a variant",
        variants=[GGUF | {"calibration": {"documents": "nowhere.jsonl"}}],
    ),
    in_profile(
        "a calibration text of a variant that is also evaluated",
        variants=[GGUF | {"calibration": {"documents": "demo/data/held-out.jsonl"}}],
    ),
    in_recipe("a rule by distance without a base", leave_out_beyond=5),
    in_recipe("no matching clients", ROUND),
    in_recipe("clients that are not a list", ROUND, clients="demo/models/*"),
    in_recipe("sample counts of some clients only", ROUND, clients=["demo/models/*"], samples={"demo/models/base": 3}),
    in_recipe("Adam without a rate", ROUND, clients=["demo/models/*"], adam={"tau": 0.001}),
    in_recipe("Adam with an unknown setting", ROUND, clients=["demo/models/*"], adam={"rate": 0.01, "beta": 0.9}),
    in_recipe("Adam with a beta of one", ROUND, clients=["demo/models/*"], adam={"rate": 0.01, "beta1": 1}),
    in_recipe("Adam together with momentum", ROUND, clients=["demo/models/*"], adam={"rate": 0.01}, momentum=0.9),
    in_recipe(
        "client adapters of a base with an adapter",
        ROUND,
        base_model="demo/models/base+demo/adapters/shifter-lora",
        clients=["demo/adapters/*"],
    ),
    Mistake("recipe", "a client round outside a profile", {"recipe.yaml": written(ROUND)}, command=MERGES),
    in_checkpoint("twice the layers", deeper),
    in_checkpoint("another architecture", in_config(architectures=["MistralForCausalLM"], model_type="mistral")),
    in_checkpoint("more layers in its config than in its weights", in_config(num_hidden_layers=4)),
    in_checkpoint("another vocabulary in its config", in_config(vocab_size=40)),
    in_checkpoint("a quantized config", in_config(quantization_config={"quant_method": "gptq"})),
    in_checkpoint("no tokenizer", removes("tokenizer*"), "tokenizer"),
    in_checkpoint("an invalid tokenizer.json", writes("tokenizer.json", "{"), "tokenizer"),
    in_checkpoint("a tokenizer.json that is a list", writes("tokenizer.json", "[]"), "tokenizer"),
    Mistake(
        "tokenizer",
        "other tokens under the same ids",
        {
            "profile.yaml": written(
                but(
                    PROFILE, recipe=but(RECIPE, models=of_models("demo/models/reverser", "demo/models/other-tokenizer"))
                )
            )
        },
    ),
    in_profile("a task that lm-eval does not ship", evaluate={"tasks": [but(GUARD, task="mmlu_pr")]}),
    in_guard("a missing task file", task="tasks/nowhere.yaml"),
    in_task("no name", task=...),
    in_task("no data", data=""),
    in_task("invalid data", data="one\ntwo\n"),
    in_task("data without documents", data="\n"),
    in_task("an unknown metric", guard={"metric": "acc_norm"}),
    in_task("a metric of an unknown subtask", guard={"metric": {"echoes": "acc"}}),
    in_task(
        "no metric with a mean", metric_list=[{"metric": "acc", "aggregation": "median", "higher_is_better": True}]
    ),
    in_checkpoint(
        "no chat template for a chat evaluation", removes("chat_template*"), "tokenizer", evaluate=IN_MESSAGES
    ),
    in_task("more few-shot examples than documents", num_fewshot=1000, fewshot_split="test"),
    in_task("a prompt template with a syntax error", doc_to_text="{{prompt"),
    in_task("a prompt template with an unknown field", doc_to_text="question", doc_to_target="{{solution[3]}}"),
    in_checkpoint("a chat template that fails", with_template, "tokenizer", evaluate=IN_MESSAGES),
    in_task("a missing split", test_split="exam"),
    in_task("clusters by an unknown field", guard={"cluster_by": "chapter"}),
    in_task("an unknown output type", output_type="essay"),
    in_task("perplexity as a task", output_type="loglikelihood_rolling"),
    in_task(
        "a mean of a metric without document scores",
        output_type="multiple_choice",
        metric_list=[*TASK["metric_list"], F1],
    ),
    in_task("a group that weights its tasks equally", **GROUP),
    in_task("generation settings for a choice task", guard={"gen_kwargs": {"max_gen_toks": 8}}),
    in_task("an unknown generation setting", guard={"gen_kwargs": {"temprature": 0.5}}, **FREE),
    in_profile(
        "one task with two prompt settings",
        evaluate={"tasks": [GUARD, but(GUARD, guarded_by="shifter", num_fewshot=2)]},
    ),
    in_guard("a word instead of a few-shot count", num_fewshot="five"),
    in_guard("few-shot turns without a chat template", fewshot_as_multiturn=True),
    to_target("an unknown kind", to="ftp", path="releases"),
    to_target("a directory target without a path", to="directory"),
    to_target("a file instead of a directory", writes("releases", ""), to="directory", path="releases"),
    to_target("the Hub without a token", to="hub", repo="acme/support"),
    to_target("a Hub repository without an organization", to="hub", repo="support"),
    to_target("a missing signing key", to="directory", path="releases", sign_key="release.key"),
    to_target(
        "an invalid signing key",
        writes("release.key", "secret"),
        to="directory",
        path="releases",
        sign_key="release.key",
    ),
    to_target("a bucket URL without a name", to="s3", url="s3://"),
    under_license("a parent without permission to modify", purpose="commercial", visibility="public"),
    under_license("an unknown purpose", purpose="fun", visibility="public"),
    Mistake(
        "license",
        "a public target with a private license check",
        {
            "profile.yaml": written(
                but(
                    PROFILE,
                    publish={"to": "hub", "repo": "acme/support", "visibility": "public"},
                    checks={"license": {"purpose": "commercial", "visibility": "private"}},
                )
            )
        },
    ),
    says("a missing argument", "run"),
    says("an unknown command", "relase", "profile.yaml"),
    says("an unknown option", "run", "profile.yaml", "--aprove"),
    says("a missing profile", "run", "nowhere.yaml"),
    says("a check of a missing file", "check", "nowhere.yaml"),
    says("a directory instead of a profile", "check", "demo"),
    says("a recipe instead of a profile", "run", "recipe.yaml"),
    says("a merge into a nonempty directory", "merge", "recipe.yaml", "demo"),
    says("a merge of a missing recipe", "merge", "nowhere.yaml", "out"),
    says("a merge on an unknown device", "merge", "recipe.yaml", "out", "--device", "tpu"),
    says("a comparison without a profile", "compare", "demo/models/base", "demo/models/reverser"),
    says("results without a model name", "gate", "results", "-p", "profile.yaml"),
    says("a directory that is not a release", "verify", "demo"),
    says("a missing release", "verify", "./releases/v1"),
    says("a quota with an unknown unit", "store", "gc", "--quota", "much"),
    says("forgetting a profile without runs", "store", "gc", "--forget", "nobody"),
    says("a history of zero runs", "history", "--last", "0"),
    says("a port out of range", "server", "--port", "70000"),
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
        files={"profile.yaml": written(but(PROFILE, evaluate={"tasks": [but(GUARD, task=RETRIEVAL)]}))},
    ),
)
