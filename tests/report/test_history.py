"""Test the history of runs: storing and trusting records, finding changes, and rendering the history page."""

from __future__ import annotations

import multiprocessing
import random
import re
from collections.abc import Callable
from contextlib import suppress
from html import unescape
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
from builders.results import build, update
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Page

from mergegate.merge_core.errors import Finding
from mergegate.merge_core.recipe import RunWindow
from mergegate.tasks.base.stage import StageEnd
from mergegate.tasks.release import report
from mergegate.tasks.release.report import (
    RunParent,
    RunRecord,
    RunScore,
    RunStage,
    archive,
    archive_run,
    changes_since,
    history,
    read_history,
)
from mergegate.tasks.release.report.archive import NeighborPages, add_links, run_facts
from mergegate.tasks.release.report.history import History
from mergegate.tasks.release.report.history_page import Chart, Series, height_of
from mergegate.tasks.release.report.plots import NARROW, WIDE

BEGAN = 1_790_000_000.0  # seconds since the epoch
DAY = 86_400.0
TASKS = {
    "support-assistant": ("mmlu", "gsm8k", "tickets"),
    "code-helper": ("humaneval", "mbpp", "ifeval", "mmlu"),
    "translator-eu": ("flores_de", "flores_fr", "flores_pl"),
}
RECIPE = "merge_method: ties\nbase_model: acme/base\nparameters: {{density: {density}}}\n"


def nights(count: int = 100, seed: int = 1) -> list[RunRecord]:
    """Return the nightly runs of all profiles, in the order in which they ended."""
    told = []
    chance = random.Random(seed)
    for number, (profile, tasks) in enumerate(TASKS.items()):
        levels = {task: chance.uniform(45, 88) for task in tasks}
        revision, version = 0, 0
        for night in range(count):
            if chance.random() < 0.12:
                revision += 1
                levels = {task: level + chance.gauss(0.15, 0.8) for task, level in levels.items()}
            scores = tuple(_score(task, level, chance) for task, level in levels.items())
            ending = chance.random()
            status = "refused" if any(score.drop > 3 for score in scores) else "released"
            if ending < 0.04:
                status = "invalid" if ending < 0.01 else "refused"
                scores = ()
            elif ending < 0.05:
                status, scores = "failed", ()
            elif revision == version and status == "released" and night:
                status = "nothing new"
            if status == "released":
                version = revision
            recipe = RECIPE.format(density=0.5 if night < 60 else 0.4)
            began = BEGAN + night * DAY + number * 4000
            run = f"{profile}-{night}"
            told.append(_night(run, profile, began, status, scores, revision, recipe, chance))
    return sorted(told, key=lambda record: record.ended)


STAGES = {"licenses": 0.4, "compat": 2.0, "merge": 260.0, "perplexity": 410.0, "evaluate": 2900.0}
STAGES |= {"gate": 0.6, "report": 4.0, "publish": 95.0}


def _night(
    run: str,
    profile: str,
    began: float,
    status: str,
    scores: tuple[RunScore, ...],
    revision: int,
    recipe: str,
    chance: random.Random,
) -> RunRecord:
    fresh, known = status in ("released", "refused") and bool(scores), bool(scores)
    version = f"{revision:04x}c0ffee12"
    messages = {
        "released": f"released {profile} {version}",
        "nothing new": f"nothing new: {version} is released",
        "failed": f"{profile} failed: ConnectionResetError: reset by peer",
        "invalid": f"{profile}.yaml: unknown key 'recepe'",
        "refused": f"{profile} is not released\n{_worst(scores)}",
    }
    stages = tuple(
        RunStage(
            name=name, seconds=seconds * (chance.uniform(0.8, 1.3) if fresh else 0.02), calls=1, cached=not fresh,
            status="made" if fresh else "cached",
        )
        for name, seconds in STAGES.items()
    )  # fmt: skip
    parents = tuple(
        RunParent(name=name, ref=f"acme/{name}", revision=f"{revision:02d}" * 20, digest=f"{revision:02d}" * 8)
        for name in ("base", "chat", "tools")
    )
    fields = {"status": status, "message": messages[status], "ended": began + chance.uniform(0, 900)}
    if known:
        fields |= {"recipe": recipe, "parents": parents, "scores": scores, "bytes_merged": 16_000_000_000}
        fields |= {"perplexity": 1.0 + chance.uniform(0, 0.02), "perplexity_limit": 1.05}
        fields |= {"seconds": sum(stage.seconds for stage in stages)}
    if fresh:
        fields["bytes_made"] = 16_000_000_000
    if status in ("released", "nothing new"):
        fields["version"] = version
    method = "ties of 3 over acme-base"
    shown = stages if known else stages[:1]
    return build(RunRecord, run=run, profile=profile, method=method, stages=shown, **fields)


def _score(task: str, level: float, chance: random.Random) -> RunScore:
    drop = chance.gauss(0.6, 0.9)
    bounds = {"drop": drop, "low": drop - 1.1, "high": drop + 1.1}
    return build(RunScore, task=task, reference="chat", merge=level, outcome="fail" if drop > 3 else "pass", **bounds)


def _worst(scores: tuple[RunScore, ...]) -> str:
    if not scores:
        return "licences: cc-by-nc-4.0 (of chat) does not permit commercial use"
    worst = max(scores, key=lambda score: score.drop)
    return f"{worst.task}: {worst.drop:.1f} points below chat [{worst.low:.1f}, {worst.high:.1f}], more than 3"


PAGE = "<html><head><style></style></head><body><main>\n<header>x</header></main></body></html>"
TIES = "merge_method: ties\ndensity: 0.5\n"
EVIL = "</style><script>alert(1)</script><!--nights--> --> \" ' & {{ 7 * 7 }}"


def record(**fields: object) -> RunRecord:
    return build(RunRecord, **fields)


def stored(run: RunRecord) -> RunRecord:
    """Return the record that is read from the line of ``run``."""
    return RunRecord.model_validate_json(run.line())


def score(task: str = "gsm8k", merge: float | None = 70.0, drop: float = 1.0, **fields: object) -> RunScore:
    limit = fields.get("max_drop", 3.0)
    usual = {"reference": "math", "low": drop - 1, "high": drop + 1, "max_drop": limit, "margin": limit}
    return build(RunScore, task=task, merge=merge, drop=drop, **{**usual, **fields})


def parent(name: str = "math", revision: str | None = "a" * 40, digest: str = "0123456789abcdef") -> RunParent:
    return RunParent(name=name, ref=f"acme/{name}", revision=revision, digest=digest)


def measured(**fields: object) -> RunRecord:
    usual = {"version": "v1", "parents": (parent(),), "scores": (score(),), "recipe": TIES}
    return record(**{**usual, **fields})


def of_window(
    first: int, last: int, *, schedule: str = "mean", method: str = "linear", scores: tuple[RunScore, ...] = ()
) -> RunRecord:
    """Return the record of a run that merged every 25th checkpoint from ``first`` to ``last``."""
    names = tuple(f"checkpoint-{step}" for step in range(first, last + 1, 25))
    models = "".join(f"- model: ../runs/{name}\n  parameters:\n    weight: {first}\n" for name in names)
    return measured(
        parents=tuple(parent(name, revision=None) for name in names),
        recipe=f"# training run: {last}\nmerge_method: {method}\nmodels:\n{models}dtype: bfloat16\n",
        windows=(RunWindow(names, first, last, schedule),),
        scores=scores or (score("copy", drop=last / 200, reference=names[-1]),),
    )


class TestTheLines:
    @given(
        message=st.text(st.characters(exclude_categories=["Cs"]), max_size=3000),
        ended=st.floats(allow_nan=False, allow_infinity=False),
        drop=st.floats(-100, 100),
    )
    @settings(max_examples=50)
    def test_a_stored_record_is_read_back(self, message: str, ended: float, drop: float) -> None:
        one = record(message=message, ended=ended, scores=(score(drop=drop),))
        assert b"\n" not in one.line()
        assert stored(one) == one

    def test_a_damaged_line_loses_only_itself_and_the_next_run_removes_it(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file, first, second, third = tmp_path / history.HISTORY, record(run="a"), record(run="b"), record(run="c")
        line = record(run="torn").line()
        for length in (*range(1, len(line), 9), len(line) - 1):
            file.write_bytes(b"\n".join((first.line(), line[:length], second.line())))
            known = read_history(tmp_path)
            assert known.records == (first, second)
            assert known.damage_sentence() == "1 damaged line of the history left out."
            history.append_record(tmp_path, known, third)
            assert read_history(tmp_path) == History((first, second, third))
            assert caplog.messages.pop() == "1 damaged line of the history left out."

    @pytest.mark.parametrize("what", [b"", b"\0" * 100, b"[1]\n{}\nnull\n" + b"[" * 100_000, b"\xff\xfe\n"])
    def test_garbage_gives_an_empty_history(self, tmp_path: Path, what: bytes) -> None:
        (tmp_path / history.HISTORY).write_bytes(what)
        assert read_history(tmp_path).records == ()
        history.append_record(tmp_path, read_history(tmp_path), record())
        assert read_history(tmp_path) == History((record(),))

    def test_a_directory_in_place_of_the_history_does_not_stop_a_run(self, tmp_path: Path) -> None:
        (tmp_path / history.HISTORY / "x").mkdir(parents=True)
        assert "cannot be read" in read_history(tmp_path).damage_sentence()
        history.append_record(tmp_path, read_history(tmp_path), record())
        assert read_history(tmp_path).records == (record(),)

    def test_the_history_is_bounded_and_keeps_the_newest_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(history, "MAX_PER_PROFILE", 5)
        known = History()
        for number in range(30):
            known = history.append_record(tmp_path, known, record(run=str(number)))
            assert known == read_history(tmp_path)
            assert len(known.records) <= 5
            assert known.records[-1].run == str(number)
        history.append_record(tmp_path, known, record(run="other", profile="other"))
        assert {one.profile for one in read_history(tmp_path).records} == {"demo", "other"}

    def test_long_texts_are_cut(self) -> None:
        one = record(message="x" * 10**6, recipe="y" * 10**6, profile="z" * 10**4)
        assert len(one.line()) < 10_000


class TestWhatChanged:
    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({}, "Parents, recipe, limits and scores are unchanged."),
            ({"status": "refused"}, "was released"),
            ({"version": "v2"}, "Version v1 → v2."),
            ({"parents": (parent("math", "b" * 40, "f" * 16),)}, "Parent math: revision aaaaaaaaaa → bbbbbbbbbb."),
            ({"parents": (parent(revision=None, digest="f" * 16),)}, "Parent math: its files changed, digest"),
            ({"parents": (parent(), parent("code"))}, "Parent code was added."),
            ({"recipe": "merge_method: ties\ndensity: 0.3\n"}, "Recipe: density: 0.5 → 0.3."),
            ({"recipe": f"{TIES}lambda: 1\n"}, "Recipe: lambda: 1 was added."),
            ({"recipe": "merge_method: ties\n"}, "Recipe: density: 0.5 was removed."),
            ({"recipe": f"# halved\n{TIES}"}, "Recipe: only comments or the layout changed."),
            ({"scores": (score(max_drop=2.0),)}, "gsm8k: max_drop 3, margin 3 → max_drop 2, margin 2."),
            ({"scores": (score(merge=68.5, drop=2.5),)}, "gsm8k: score 70.0 → 68.5, drop 1.0 → 2.5 (reference math)."),
            ({"scores": (score(drop=-1.0),)}, "gsm8k: score 70.0, drop 1.0 → \N{MINUS SIGN}1.0 (reference math)."),
            ({"scores": (score(), score("mmlu"))}, "mmlu: new guard, with math as the reference."),
            ({"scores": ()}, "gsm8k: the guard with math as the reference was removed."),
        ],
    )
    def test_a_change_becomes_a_sentence(self, changes: dict[str, object], sentence: str) -> None:
        said = changes_since([measured()], measured(run="now", **changes))
        assert sentence in " ".join(said)
        assert len(said) == (3 if "version" in changes else 2)

    def test_a_window_that_moved_is_one_sentence(self) -> None:
        before, now = of_window(25, 200), of_window(225, 400)
        assert changes_since([before], now)[1:] == (
            "Training run: steps 25 to 200 → steps 225 to 400.",
            "copy: score 70.0, drop 1.0 → 2.0 (reference checkpoint-400).",
        )
        unchanged = "Parents, recipe, limits and scores are unchanged."
        assert changes_since([before], update(before, run="now"))[-1] == unchanged

    def test_a_window_of_another_size_and_schedule_is_one_sentence(self) -> None:
        before, now = of_window(25, 200), of_window(325, 400, schedule="cosine")
        assert changes_since([before], now)[1] == (
            "Training run: steps 25 to 200 → steps 325 to 400, 8 checkpoints → 4 checkpoints, "
            "mean weights → cosine weights."
        )

    def test_changes_outside_the_window_are_listed(self) -> None:
        before = of_window(25, 200)
        moved = of_window(225, 400, method="median", scores=(score("copy", reference="checkpoint-200"),))
        changes = changes_since([before], update(moved, parents=(*moved.parents, parent("base"))))
        assert changes[2:] == ("Parent base was added.", "Recipe: merge_method: linear → median.")
        rewritten = update(before, parents=(*before.parents[:-1], parent("checkpoint-200", digest="f")))
        assert changes_since([before], rewritten)[1].startswith("Parent checkpoint-200: its files changed")

    def test_scores_equal_to_a_tenth_of_a_point_are_unchanged(self) -> None:
        said = changes_since([measured()], measured(run="now", scores=(score(merge=70.02, drop=1.04),)))
        assert "are unchanged" in said[-1]

    def test_a_run_is_compared_with_the_last_run_that_has_scores_and_a_version(self) -> None:
        stopped = record(run="stopped", status="refused", message="licences: no")
        now = measured(run="now", recipe="merge_method: ties\ndensity: 0.3\n", version="v2")
        changes = changes_since([measured(), stopped], now)
        assert re.fullmatch(r"The previous run \(.*\) was refused\.", changes[0])
        assert {"Recipe: density: 0.5 → 0.3.", "Version v1 → v2."} <= set(changes)

    def test_runs_of_other_profiles_and_flows_are_ignored(self) -> None:
        others = [measured(profile="other"), measured(flow="sweep")]
        assert changes_since(others, measured()) == ("This is the first recorded run of this profile.",)

    def test_a_refusal_for_another_reason_is_distinguished(self) -> None:
        before = record(status="refused", message="licences: no")
        assert "different reason" not in changes_since([before], update(before, run="2"))[0]
        assert "different reason" in changes_since([before], update(before, run="3", message="tokenizer: no"))[0]


class TestThePages:
    def test_every_link_resolves_and_neighbors_link_to_each_other(self, tmp_path: Path) -> None:
        for number in range(5):
            archive_run(tmp_path, record(run=str(number), ended=1e9 + number), PAGE)
            archive_run(tmp_path, record(run=str(number), ended=1e9 + number, profile="other"), PAGE)
        pages = sorted((tmp_path / "demo").glob("*.html"))
        assert len(pages) == 5
        chain = {page: neighbours(page) for page in pages}
        for before, after in pairwise(pages):
            assert chain[before]["next"] == after
            assert chain[after]["prev"] == before
        assert "prev" not in chain[pages[0]]
        assert "next" not in chain[pages[-1]]
        assert neighbours(tmp_path / "demo.html")["prev"] == pages[-2]
        for page in [*tmp_path.rglob("*.html")]:
            for link in links(page):
                assert link.is_file(), (page, link)
                assert tmp_path in link.parents
        listed = set(links(tmp_path / "index.html"))
        assert set(pages) <= listed

    def test_the_newest_sixty_pages_remain_without_dangling_links(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(archive, "MAX_PAGES", 3)
        stray = tmp_path / "demo" / "9999-stray.html"
        stray.parent.mkdir()
        stray.write_text("of a run that was killed before it was noted")
        for number in range(6):  # The clock runs backward.
            kept = archive_run(tmp_path, record(run=str(number), ended=1e9 - 1000 * number), PAGE)
        assert not stray.exists()
        assert len(list((tmp_path / "demo").glob("*.html"))) == 3
        assert kept.page.is_file(), "the newest by the order of runs, though its clock says otherwise"
        assert [one.run for one in read_history(tmp_path).records] == list("012345")
        for page in tmp_path.rglob("*.html"):
            assert all(link.is_file() for link in links(page)), page

    def test_a_search_page_is_stored_and_removed_with_its_release_page(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(archive, "MAX_PAGES", 2)
        for number in range(3):
            kept = archive_run(tmp_path, record(run=str(number), flow="sweep", ended=1e9 + number), PAGE, search=PAGE)
            beside = neighbours(kept.page)["alternate"]
            assert beside.name.endswith(".sweep.html")
            assert kept.page.name.removesuffix(".html") in beside.name
        assert len(list((tmp_path / "demo").iterdir())) == 4
        assert (tmp_path / "demo.sweep.html").is_file()
        assert all(link.is_file() for page in tmp_path.rglob("*.html") for link in links(page))

    def test_runs_in_the_same_second_have_separate_pages(self, tmp_path: Path) -> None:
        kept = {archive_run(tmp_path, record(run=str(number)), PAGE).page for number in range(4)}
        assert len(kept) == 4

    def test_a_run_killed_while_archiving_does_not_block_the_next(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps = ("write_state", "append_record", "_relink", "render_history")
        died = 0
        for at in range(11):
            reports, taken = tmp_path / str(at), []
            for number in range(2):
                archive_run(reports, record(run=str(number), ended=1e9 + number), PAGE)
            with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                for step in steps:
                    patch.setattr(archive, step, _dying(getattr(archive, step), taken, at))
                archive_run(reports, record(run="killed", ended=1e9 + 2), PAGE)
            died += len(taken) == at + 1
            archive_run(reports, record(run="next", ended=1e9 + 3), PAGE)
            known = [one.run for one in read_history(reports).records]
            assert known in (["0", "1", "next"], ["0", "1", "killed", "next"])
            for page in (reports / "index.html", *(reports / one.report for one in read_history(reports).records)):
                assert all(link.is_file() for link in links(page)), (at, page)
            assert not list(reports.rglob("*.partial"))
        assert died >= 8, "it was interrupted at every step there is"

    @pytest.mark.proof
    def test_eight_concurrent_runs_are_all_archived(self, tmp_path: Path) -> None:
        # Do not fork this process: other tests have left threads and handlers in it.
        clean = multiprocessing.get_context("forkserver")
        clean.set_forkserver_preload(["mergegate.tasks.release.report"])
        ending = [clean.Process(target=_end_some, args=(tmp_path, worker)) for worker in range(8)]
        for one in ending:
            one.start()
        for one in ending:
            one.join(120)
        assert [one.exitcode for one in ending] == [0] * 8
        known = read_history(tmp_path)
        assert known.damaged == 0
        assert sorted(one.run for one in known.records) == sorted(f"{a}-{b}" for a in range(8) for b in range(3))
        seen, page = [], tmp_path / known.records[0].report
        while page:
            seen.append(page.relative_to(tmp_path).as_posix())
            page = neighbours(page).get("next")
        assert seen == [one.report for one in known.records], "one chain, in the order of the lines"

    @pytest.mark.parametrize(
        "profile", ["../../etc/passwd", "index", "INDEX", "", "..", ".hidden", "a/b", "a\0b", "x" * 400, "ärger", EVIL]
    )
    def test_profile_names_cannot_escape_the_directory(self, tmp_path: Path, profile: str) -> None:
        reports = tmp_path / "reports"
        for _ in range(2):
            kept = archive_run(reports, record(profile=profile), PAGE)
            assert kept.page.parent.parent == reports
            assert kept.latest.parent == reports
        assert {path.name for path in tmp_path.iterdir()} == {"reports"}
        assert "All runs" in (reports / "index.html").read_text(encoding="utf-8")
        assert report.file_name(profile).lower() != "index"

    def test_linking_a_page_again_replaces_its_links(self, tmp_path: Path) -> None:
        first = archive_run(tmp_path, record(), PAGE)
        second = archive_run(tmp_path, record(run="2"), first.page.read_text(encoding="utf-8"))
        text = second.page.read_text(encoding="utf-8")
        assert text.count("<!--nights-->") == text.count("<!--since-->") == 1
        assert neighbours(second.page) == {"prev": first.page}


class TestTheIndex:
    def test_the_lead_names_the_profiles_that_need_attention(self) -> None:
        runs = [record(profile=name, status=status) for name, status in (("a", "released"), ("b", "failed"))]
        assert "1 of 2 profiles succeeded in their latest run. Check b (error)." in index(*runs).text
        assert "The latest run succeeded." in index(record()).text
        assert "did not succeed: refused." in index(record(status="refused")).text
        text = index(*(record(profile=str(number), status="refused") for number in range(6))).text
        assert "0 of 6 profiles" in text
        assert "Check 5 (refused), 4 (refused), 3 (refused) and 3 more." in text

    def test_every_link_inside_the_index_has_a_target(self) -> None:
        page = index(*nights())
        assert {"reading", "how-drop", "how-outcome"} <= set(page.inner_links) <= set(page.attributes("id"))

    def test_a_task_has_the_same_color_in_both_charts_and_limits_are_named(self) -> None:
        scores = (score("a", None), score("b"), score("b", reference="c", margin=4.0))
        page = report.render_history(History(tuple(measured(run=str(number), scores=scores) for number in range(2))))
        colors = re.findall(r"var\(--series-(\d)\)[^>]*></svg> (?:<wbr>)?([ab])", page)
        assert len({color for color, task in colors if task == "b"}) == 1
        assert len({color for color, task in colors}) == 2
        assert "The limits differ between the guards" in page
        alike = tuple(update(item, margin=4.0) for item in scores)
        text = index(*(measured(run=str(number), scores=alike) for number in range(2))).text
        assert "max_drop 3" in text
        assert "margin 4" in text

    def test_untrusted_text_is_escaped(self) -> None:
        names = dict.fromkeys(("profile", "flow", "status", "message", "version", "method"), EVIL)
        names |= {"report": f"{EVIL}/x.html", "parents": (parent(EVIL),), "scores": (score(EVIL), score(EVIL + "2"))}
        evil = [record(run=str(number), recipe=EVIL * (number + 1), **names) for number in range(3)]
        page = Page(report.render_history(History(tuple(evil), 1), pages={run.report for run in evil}))
        assert "script" not in page.tags
        assert "alert(1)" in page.text
        assert "49" not in page.text
        texts = dict.fromkeys(("name", "flow", "status", "message"), EVIL)
        finding = Finding("block", EVIL, EVIL, EVIL, EVIL)
        stage = StageEnd(EVIL, EVIL, "made", 1, EVIL)
        assert (
            "script" not in Page(report.render_ending(report.EndedRun(**texts, finding=finding, stages=(stage,)))).tags
        )

    def test_the_index_has_no_scripts_or_external_resources(self) -> None:
        page = report.render_history(History(tuple(nights())))
        read = Page(page)
        assert read.tags.isdisjoint({"script", "link", "img", "iframe", "object"})
        assert read.attributes("src") == []
        assert all(href.startswith("#") for href in read.attributes("href")), "no report of these nights is kept"
        assert "default-src 'none'" in page
        assert "url(" not in page
        assert len(page) < 400_000

    def test_the_index_shows_the_state_of_every_profile(self) -> None:
        runs = nights()
        text = index(*runs).text
        assert "300 runs of 3 profiles" in text
        for last in {run.profile: run for run in runs}.values():
            assert last.message.splitlines()[0] in text
            assert changes_since(runs, last)[0] in unescape(text)

    def test_equal_histories_give_equal_pages(self) -> None:
        assert report.render_history(History(tuple(nights()))) == report.render_history(History(tuple(nights())))

    @pytest.mark.parametrize("ended", [-1e18, 0.0, 1e18, 253402300800.0])
    def test_a_clock_that_is_off_by_years_is_tolerated(self, tmp_path: Path, ended: float) -> None:
        archive_run(tmp_path, record(ended=ended), PAGE)
        archive_run(tmp_path, record(ended=ended, scores=(score(),)), PAGE)
        assert (tmp_path / "index.html").is_file()

    def test_an_empty_history_is_reported(self) -> None:
        assert "No run has ended here yet." in index().text

    def test_damaged_lines_are_reported(self) -> None:
        assert "2 damaged lines" in report.render_history(History((record(),), 2))


class TestThePlots:
    @given(st.lists(st.one_of(st.none(), st.floats(-1e9, 1e9)), min_size=1, max_size=40))
    @settings(max_examples=100)
    def test_every_value_is_drawn_inside_the_chart(self, values: list[float | None]) -> None:
        chart = Chart("points", ("1 Jan",) * len(values), (Series("a", "", tuple(values)),))
        for layout in (WIDE, NARROW) if chart.drawn_series else ():
            points = [point for piece in chart.line_pieces(chart.series[0], layout) for point in piece]
            assert len(points) == sum(value is not None for value in values)
            for x, y in points:
                assert 0 <= x <= layout.width
                assert 0 <= y <= height_of(layout)

    def test_bar_heights_match_the_axis(self) -> None:
        series = (Series("a", "", (10.0, 5.0)), Series("b", "", (10.0, 0.0)))
        drawn = Chart("seconds", ("x", "y"), series, bars=True).bar_paths(WIDE)
        pieces = re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)h", "".join(drawn))
        heights = [float(bottom) - float(top) for bottom, top in pieces]
        assert len(heights) == 3
        assert heights[0] == pytest.approx(heights[2], abs=0.2)
        assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)


def index(*runs: RunRecord) -> Page:
    return Page(report.render_history(History(runs)))


def links(page: Path) -> list[Path]:
    found = Page(page.read_text(encoding="utf-8")).attributes("href")
    return [(page.parent / unquote(href)).resolve() for href in found if not href.startswith("#")]


def neighbours(page: Path) -> dict[str, Path]:
    read = Page(page.read_text(encoding="utf-8"))
    return {
        str(attributes["rel"]): (page.parent / unquote(str(attributes["href"]))).resolve()
        for tag, attributes in read.elements
        if tag == "a" and "rel" in attributes
    }


def _dying(step: Callable[..., object], taken: list[int], at: int) -> Callable[..., object]:
    """Wrap ``step`` so that step number ``at`` of the run ends in an interrupt, as if the process were gone."""

    def call(*arguments: object, **named: object) -> object:
        if len(taken) == at + 1:
            return step(*arguments, **named)
        taken.append(1)
        if len(taken) == at + 1:
            raise KeyboardInterrupt
        return step(*arguments, **named)

    return call


def _end_some(reports: Path, worker: int) -> None:
    for number in range(3):
        archive_run(reports, record(run=f"{worker}-{number}"), PAGE)


def test_a_page_shows_the_facts_of_its_run_and_release() -> None:
    record = RunRecord(
        run="7f", flow="release", profile="demo", ended=0.0, seconds=61, status="released", message="",
        version="3573902a24b3", location="releases/my demo/3573902a24b3", machine="build-7, 2 cores",
        seen_at="https://prefect.example/runs/flow-run/7f",
    )  # fmt: skip
    assert dict(run_facts(record)) == {
        "ended": "1970-01-01 00:00 UTC, after 1 m 01 s on build-7, 2 cores",
        "release": "3573902a24b3",
        "published to": "releases/my demo/3573902a24b3",
        "reproduce with": "mergegate reproduce 'releases/my demo/3573902a24b3'",
        "Prefect": "https://prefect.example/runs/flow-run/7f",
    }
    found = update(record, flow="sweep", status="passed", version="", location="my winner.yaml")
    assert {name: said for name, said in run_facts(found) if name not in ("ended", "Prefect")} == {
        "recipe": "my winner.yaml",
        "merge it with": "mergegate merge 'my winner.yaml' OUT",
    }
    hostile = [("x", "https://a/<script>"), ("y", "<b>"), *run_facts(record)]
    page = add_links("<style></style><main><header></header></main>", "demo/a.html", NeighborPages(), (), hostile)
    assert '<a href="https://prefect.example/runs/flow-run/7f">' in page
    assert "<script>" not in page
    assert "<b>" not in page
    assert add_links(page, "demo/a.html", NeighborPages(), (), hostile) == page  # links are added only once


def variant(name: str, outcome: str) -> report.RunVariant:
    return report.RunVariant(type=name, outcome=outcome, published=outcome == "pass", drop=1.0)


def test_a_line_has_the_variants_of_its_run_if_there_are_any() -> None:
    assert b"variants" not in record().line()
    assert "variants" not in record().model_dump(mode="json")
    one = record(variants=(variant("Q8_0", "pass"), variant("Q4_K_M", "fail")))
    assert stored(one) == one


def test_changes_name_variants_with_another_verdict() -> None:
    before = record(run="1", parents=(parent(),), variants=(variant("Q8_0", "pass"), variant("Q4_K_M", "pass")))
    now = update(before, run="2", variants=(variant("Q4_K_M", "fail"), variant("FP8_DYNAMIC", "pass")))
    assert changes_since([before], now)[-3:] == (
        "Variant Q4_K_M: pass → fail.",
        "Variant FP8_DYNAMIC was added: pass.",
        "Variant Q8_0 was removed.",
    )
    refused = update(before, run="3", status="refused", variants=())
    assert not any("Variant" in sentence for sentence in changes_since([before], refused))


def test_the_history_page_lists_the_variants_of_a_run() -> None:
    text = index(record(variants=(variant("Q8_0", "pass"), variant("Q4_K_M", "fail")))).text
    assert "Q8_0 pass" in text
    assert "Q4_K_M fail, not published" in text


@pytest.mark.parametrize("status", ["refused", "invalid"])
@pytest.mark.parametrize("stages", [("licenses",), ("licenses", "merge")])
def test_the_page_of_an_ended_run_says_that_nothing_was_merged_only_if_it_is_true(
    status: str, stages: tuple[str, ...]
) -> None:
    ended = [StageEnd(name, "", "made", 1, "") for name in stages]
    run = report.EndedRun(name="demo", flow="release", status=status, message="x", stages=tuple(ended))
    page = Page(report.render_ending(run))
    assert ("merged and published nothing" in page.text) == ("merge" not in stages)
