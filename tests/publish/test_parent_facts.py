"""Facts about a parent come from its card: links to its provider's documents, datasets, energy and training compute."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path

import pytest
from release_samples import sha

from mergegate.tasks.models.checkpoints import PinnedCheckpoint
from mergegate.tasks.release.publish.documents.facts import ParentFacts, card_links, parent_facts

FRONT = """\
---
license: apache-2.0
datasets: [acme/web, acme/web, {name: x}, "  acme/books "]
training_compute: 6.0e+22
co2_eq_emissions: {emissions: 1200.5, energy_consumed: 3.25, source: codecarbon}
---
"""
SUMMARY = "https://acme.example/training-summary.pdf"
POLICY = "https://acme.example/legal/copyright"


def facts(root: Path, card: str | bytes | None, training_compute: float | None = None) -> ParentFacts:
    """Return the facts about a local parent with this README.md."""
    root.mkdir(exist_ok=True)
    if card is not None:
        (root / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
    parent = PinnedCheckpoint(name="general", digest=sha("x"), directory=root, ref="models/general", is_base=True)
    return parent_facts(parent, "apache-2.0", training_compute)


def test_metadata_of_a_card_become_facts(tmp_path: Path) -> None:
    own = facts(tmp_path, FRONT)
    assert own.datasets == ("acme/web", "acme/books")
    assert (own.training_compute, own.training_compute_source) == (6e22, "card of models/general")
    assert (own.energy, own.emissions, own.emissions_source) == (3.25, 1200.5, "codecarbon")
    assert [card.sha256 for card in own.cards] == [hashlib.sha256(FRONT.encode()).hexdigest()]
    assert (own.role, own.identity, own.url, own.supplier) == ("base", sha("x"), "", "")
    stated = facts(tmp_path, FRONT, 1e21)  # The profile overrides the card.
    assert (stated.training_compute, stated.training_compute_source) == (1e21, "publish.about")


@pytest.mark.parametrize("value", ["[1]", "-1", "0", ".inf", ".nan", "yes", "many", "1e999", "{a: 1}", "null"])
def test_implausible_numbers_are_missing(tmp_path: Path, value: str) -> None:
    own = facts(tmp_path, f"---\ntraining_compute: {value}\nco2_eq_emissions: {value}\n---\n")
    assert (own.training_compute, own.training_compute_source, own.emissions) == (None, "", None)


@pytest.mark.parametrize(
    "text",
    [
        f"[Public summary of training content]({SUMMARY})",
        f"Our [training data summary](<{SUMMARY}>) follows the template.",
        f'<a class="x" href="{SUMMARY}">Summary of the training data</a>',
        f"* Training-content summary: {SUMMARY}.",
        f"Template of the AI Office: <{SUMMARY}>",
        "[PDF](https://acme.example/training-data-summary.pdf)",
    ],
)
def test_summaries_of_the_training_content_are_found_in_all_kinds_of_links(tmp_path: Path, text: str) -> None:
    own = facts(tmp_path, f"{FRONT}\n# Model\n\n{text}\n\nMore: [us](https://acme.example).\n")
    (link,) = own.training_summaries
    assert link.url in (SUMMARY, "https://acme.example/training-data-summary.pdf")
    assert own.copyright_policies == ()


@pytest.mark.parametrize("text", [f"[Copyright policy]({POLICY})", f"Policy on copyright: {POLICY}"])
def test_copyright_policies_are_found(tmp_path: Path, text: str) -> None:
    own = facts(tmp_path, text)
    assert [link.url for link in own.copyright_policies] == [POLICY]
    assert own.training_summaries == ()


@pytest.mark.parametrize(
    "address",
    [
        *("javascript:alert(1)", "data:text/html,x", "file:///etc/passwd", "ftp://acme.example/x", "https://"),
        *("https://user:secret@acme.example/x", "//acme.example/x", "models/../../x"),
    ],
)
def test_only_links_to_web_pages_without_credentials_are_taken(tmp_path: Path, address: str) -> None:
    own = facts(tmp_path, f"[Copyright policy]({address})\n[Training data summary](<{address}>)\n")
    assert own.copyright_policies == own.training_summaries == ()


def test_a_link_cannot_end_the_markdown_that_shows_it(tmp_path: Path) -> None:
    own = facts(tmp_path, "[Copyright policy](https://acme.example/a)x|[b](c)<script>\n")
    assert [link.url for link in own.copyright_policies] == ["https://acme.example/a"]
    for link in card_links('Copyright policy https://a.example/x)"<b>|\n[t](https://a.example/\\"y")'):
        assert not set(link.url) & set("()<>\"'|\\ \n`[]")


def test_at_most_five_links_of_limited_length_are_taken(tmp_path: Path) -> None:
    lines = [f"[Copyright policy {'x' * 190}{i}](https://acme.example/{i}{'y' * 400})" for i in range(9)]
    own = facts(tmp_path, "\n".join(lines))
    assert len(own.copyright_policies) == 5
    assert max(len(link.text) for link in own.copyright_policies) <= 200


def test_a_missing_or_unreadable_card_leaves_the_facts_empty(tmp_path: Path) -> None:
    assert facts(tmp_path / "none", None).cards == ()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "README.md").symlink_to("/etc/hostname")
    assert facts(tmp_path / "link", None).cards == ()
    assert facts(tmp_path / "bytes", b"\xff\x00[Copyright policy](https://a.example/\xff)").datasets == ()


def test_long_hostile_cards_are_read_quickly(tmp_path: Path) -> None:
    pieces = ["[", "](", "<a ", "href=", "https://a.example/", "(((", "[[[[", "copyright ", "training ", " \t", "x"]
    generator = random.Random(0)
    cards = [piece * ((1 << 16) // len(piece)) for piece in pieces]
    cards.append("".join(generator.choices(pieces, k=15_000)))
    for number, card in enumerate(cards):
        began = time.process_time()
        facts(tmp_path / str(number), card)
        assert time.process_time() - began < 1.5


def test_checkpoints_of_a_training_run_share_the_card_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(FRONT)
    for step in (100, 200):
        own = facts(tmp_path / f"checkpoint-{step}", None)
        assert [card.sha256 for card in own.cards] == [hashlib.sha256(FRONT.encode()).hexdigest()]
