"""Compare a compliance sheet with its sources without mergegate: cards, recipe, headers, evidence, hand-made sums."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

import pyarrow.parquet as pq
import yaml
from safetensors import safe_open

_LICENSE_TEXT = re.compile(r"^license: *(\S+)$", re.MULTILINE)


def tables(sheet: str, section: str) -> list[list[str]]:
    """Return the cells of all table rows under a heading, without escapes and column names."""
    text = sheet.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[re.sub(r"\\(.)", r"\1", cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in rows[1:] if set(row[0]) != set(":-")]


def number(text: str) -> float:
    """Return a number such as 'at most 3.3 · 10^22'."""
    match = re.search(r"([0-9.]+) · 10\^(-?[0-9]+)", text)
    assert match, text
    return float(match[1]) * 10.0 ** int(match[2])


def require_correct_sheet(release: Path, profile: Path) -> None:
    """Fail if a fact in the sheet of a demo release differs from its source."""
    sheet = (release / "COMPLIANCE.md").read_text()
    settings, recipe = yaml.safe_load(profile.read_text()), yaml.safe_load((release / "recipe.yaml").read_text())
    recipe_directory = profile.parent / Path(settings["recipe"]).parent
    facts = {row[0]: row[1] for row in tables(sheet, "Modification")}

    # Sizes: the headers of the weights, read with the safetensors library.
    parameters, formats = 0, set()
    for file in release.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a mapping
                part = tensors.get_slice(name)
                parameters += math.prod(part.get_shape())
                formats.add(part.get_dtype())
    assert facts["parameters"] == f"{parameters:,}"
    assert set(facts["number formats"].split(", ")) == formats

    # Parents: the recipe and the cards next to it.
    named = [model.get("model") or model.get("source_model") for model in recipe.get("models") or recipe["experts"]]
    named += [recipe["base_model"]] if recipe.get("base_model") else []
    rows = tables(sheet, "Parents")
    assert sorted(row[0] for row in rows) == sorted(set(named))
    assert [row[0] for row in rows] == [
        row[0] for row in tables((release / "README.md").read_text(), "How it was made")
    ]
    for row in rows:
        paths = row[0].split("+")
        cards = [(recipe_directory / path / "README.md").read_bytes() for path in paths]
        details = next(line for line in sheet.splitlines() if line.startswith(f"* {escaped(row[0])}: "))
        for card in cards:
            assert hashlib.sha256(card).hexdigest() in details
            assert b"http" not in card  # so there is nothing to find
        assert row[1] == ("base" if row[0] == recipe.get("base_model") else "parent")
        assert row[2] in {found[1] for card in cards if (found := _LICENSE_TEXT.search(card.decode()))}
        assert row[3:] == ["unknown", "not found in its card", "not found in its card"]

    # Threshold: no parent states its training compute, so a third of 10^23 counts. A byte is at most two parameters.
    numbers = re.search(
        r"at most ([0-9,]+) parameters · \(1,000 · ([0-9]+) models · width ([0-9]+) \+ (.*?)\) = ", sheet
    )
    assert numbers
    paths = {recipe_directory / path for row in rows for path in row[0].split("+")[:1]}
    weights = [sum(file.stat().st_size for file in path.glob("*.safetensors")) for path in paths]
    assert int(numbers[1].replace(",", "")) == max(parameters, *(2 * size for size in weights))
    assert int(numbers[2]) == len(set(named))
    reading = math.prod(int(number.replace(",", "")) for number in re.findall("[0-9][0-9,]*", numbers[4]))
    flop = int(numbers[1].replace(",", "")) * (1000 * int(numbers[2]) * int(numbers[3]) + reading)
    assert math.isclose(number(sheet[numbers.end() :]), flop, rel_tol=0.1)
    assert "is below the indicative threshold of 3.3 · 10^22 (a third of 10^23, because" in sheet

    # Evaluation: the evidence has one row per document and model.
    outcomes = pq.read_table(release / "evidence" / "outcomes.parquet").to_pylist()
    texts = pq.read_table(release / "evidence" / "likelihoods.parquet").to_pylist()
    evaluated = {row[0]: row for row in tables(sheet, "Evaluation")}
    for task in {row["task"] for row in outcomes}:
        documents = {row["doc_id"] for row in outcomes if row["task"] == task and row["model"] == "merge"}
        assert evaluated.pop(task)[1:4] == ["evaluation", f"{len(documents):,}", "local data"]
    held_out = settings["perplexity"]["documents"]
    digest = hashlib.sha256((profile.parent / held_out).read_bytes()).hexdigest()
    documents = {row["doc_id"] for row in texts if row["model"] == "merge"}
    assert evaluated.pop(held_out)[1:] == ["perplexity", f"{len(documents):,}", "local data", f"`{digest[:16]}`"]
    assert {row[1] for row in evaluated.values()} <= {"calibration"}

    # Statements: those of the profile, or none.
    about = settings["publish"].get("about", {})
    for field in ("intended_use", "out_of_scope", "limits"):
        text = sheet.partition(f"(`publish.about.{field}`)\n\n")[2].partition("\n\n")[0]
        stated = [re.sub(r"\\(.)", r"\1", line.removeprefix("* ")) for line in text.splitlines()]
        assert stated == about.get(field, ["Not stated by the publisher."])


def escaped(text: str) -> str:
    return re.sub(r"([_*~])", r"\\\1", text)
