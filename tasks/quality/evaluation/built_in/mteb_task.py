"""Evaluate retrieval and reranking tasks of mteb with mergegate's own ranking code. mteb loads the data from the Hub.

The scores of a query are those of mteb, except that ties count against the model. As in mteb, each text is preceded by
the model's prompt for the task, if any. Prompts are looked up by task, type, then ``query`` or ``document``. Importing
mteb takes long, so this happens only in the model process, and ``check`` reads the types of tasks from mteb's files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.evaluation.built_in.contract import TaskDocument
from mergegate.tasks.quality.evaluation.built_in.ranking import RankedQuery
from mergegate.tasks.quality.evaluation.built_in.retrieval import RankingTask, require_package
from mergegate.tasks.quality.evaluation.document_order import DataSource

if TYPE_CHECKING:
    from mergegate.tasks.models.checkpoints import LoadedModel

TYPES = ("Retrieval", "Reranking", "InstructionRetrieval", "InstructionReranking")
# Scores of mteb's other tasks on texts, which are not means over documents.
_REASONS: Mapping[str, str] = {
    "BitextMining": "an F1 score over all pairs of texts",
    "Classification": "the mean accuracy of ten classifiers that are trained on the embeddings",
    "Clustering": "the v-measure of all clusters",
    "MultilabelClassification": "the mean accuracy of classifiers that are trained on the embeddings",
    "PairClassification": "the average precision over all pairs of texts",
    "Regression": "the correlation of a regression that is trained on the embeddings",
    "STS": "the Spearman correlation over all pairs of texts",
    "Summarization": "the Spearman correlation over all summaries",
}


class MtebTask(RankingTask):
    """Retrieval or reranking task of mteb."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    kind: Literal["mteb"]
    mteb_name: str = Field(
        alias="name",
        pattern=r"^[A-Za-z0-9][\w. -]*$",
        description="Name of a retrieval or reranking task of mteb, such as `SciFact`.",
    )
    split: str = Field(default="test", description="Split to evaluate. Default: `test`.")
    subset: str | None = Field(
        default=None, description="Language or other subset of a task that has several. Default: the only subset."
    )

    libraries: ClassVar[tuple[str, ...]] = ("sentence-transformers", "mteb")

    @property
    def name(self) -> str:
        return self.mteb_name if self.subset is None else f"{self.mteb_name}-{self.subset}"

    @property
    def pinned_settings(self) -> dict[str, Any]:
        return {**super().pinned_settings, "mteb": version("mteb")}

    def resolve(self, root: Path) -> Self:
        super().resolve(root)
        types = known_types()
        if (kind := types.get(self.mteb_name)) is not None:
            self._require_ranking(kind)
        # A few tasks have no file with statistics, so another name is unknown only after loading. Case is certain.
        elif match := next((name for name in types if name.casefold() == self.mteb_name.casefold()), None):
            raise self._unknown(match)
        return self

    def files(self) -> tuple[Path, ...]:
        return ()

    def sources(self) -> tuple[DataSource, ...]:
        dataset = self._open_task().metadata.dataset
        return (DataSource(path=str(dataset["path"]), name=self.subset, revision=str(dataset.get("revision") or "")),)

    def documents(self) -> Sequence[TaskDocument]:
        task = self._open_task()
        try:
            task.load_data()
            task.convert_v1_dataset_format_to_v2(num_proc=None)
            data = task.dataset[self.subset or "default"][self.split]
            return _ranked_queries(data, task.ignore_identical_ids, self._location)
        except InvalidInput:
            raise
        except Exception as error:  # The data passes through datasets, polars and code of the task.
            cause = " ".join(str(error).split()) or type(error).__name__
            raise InvalidInput(
                self._location,
                found=f"cannot be loaded: {cause}"[:320],
                expected="a dataset on the Hub or in its cache",
                remedy="download its dataset while the network is available",
            ) from error

    def prompts_for(self, model: LoadedModel) -> Mapping[str, str | None]:
        model_prompts = getattr(model.network, "prompts", None) or {}
        kind = self._open_task().metadata.type
        prompts = {}
        for part in ("query", "document"):
            names = (f"{self.mteb_name}-{part}", self.mteb_name, f"{kind}-{part}", kind, part)
            prompts[part] = next((model_prompts[name] for name in names if name in model_prompts), None)
        return prompts

    @property
    def _location(self) -> str:
        return f"task {self.mteb_name} of mteb {version('mteb')}"

    def _unknown(self, match: str | None) -> InvalidInput:
        return InvalidInput(
            self._location,
            found="no such task",
            expected="the name of a retrieval or reranking task",
            remedy=f"did you mean {match!r}?" if match else "see https://docs.mteb.org for the names",
        )

    def _require_ranking(self, kind: str) -> None:
        if kind not in TYPES:
            raise InvalidInput(
                self._location,
                found=f"a task of type {kind}, whose score is {_REASONS[kind]}"
                if kind in _REASONS
                else f"a task of type {kind}, which does not rank texts",
                expected="a retrieval or reranking task, whose score is a mean over queries: a guard compares two "
                "models query by query",
            )

    def _open_task(self) -> Any:
        import mteb

        try:
            task: Any = mteb.get_task(self.mteb_name)
        except KeyError:
            from mteb.get_tasks import TASK_LIST

            names = [each.metadata.name for each in TASK_LIST]
            match = get_close_matches(self.mteb_name, names, n=1)
            raise self._unknown(match[0] if match else None) from None
        self._require_ranking(task.metadata.type)
        if set(task.metadata.modalities) != {"text"}:
            found = f"a task on {' and '.join(sorted(task.metadata.modalities))}"
            raise InvalidInput(self._location, found=found, expected="a task on texts alone")
        if task.skip_first_result:
            raise InvalidInput(
                self._location,
                found="a task that ignores the first text of each ranking",
                expected="a task that ranks all texts",
            )
        subsets = sorted(task.hf_subsets) if task.metadata.is_multilingual else [None]
        if self.subset not in subsets:
            raise InvalidInput(
                f"{self._location}: subset",
                found=f"{self.subset!r}" if self.subset else "missing",
                expected=f"one of {', '.join(map(str, subsets))}" if subsets != [None] else "no subset",
            )
        if self.split not in task.metadata.eval_splits:
            expected = f"one of {', '.join(task.metadata.eval_splits)}"
            raise InvalidInput(f"{self._location}: split", found=f"{self.split!r}", expected=expected)
        return mteb.get_task(
            self.mteb_name, eval_splits=[self.split], hf_subsets=[self.subset] if self.subset else None
        )


@cache
def known_types() -> Mapping[str, str]:
    """Return the type of each task for which mteb ships a file with statistics, by name."""
    package = require_package("mteb", "mteb")
    return {path.stem: path.parent.name for path in (package / "descriptive_stats").rglob("*.json")}


def _ranked_queries(data: Mapping[str, Any], is_own_text_ignored: bool, location: str) -> list[RankedQuery]:
    """Convert a split of mteb's data. Queries without judged texts are left out, as in mteb."""
    position = {str(name): at for at, name in enumerate(data["corpus"]["id"])}
    texts = _corpus_texts(data["corpus"])
    content = hashlib.sha256()
    for name, text in zip(position, texts, strict=True):
        content.update(f"{len(name)} {name} {len(text)} {text}\n".encode(errors="surrogatepass"))
    relevant, top_ranked = data["relevant_docs"], data["top_ranked"]
    documents = []
    columns = data["queries"].column_names
    instructions = data["queries"]["instruction"] if "instruction" in columns else [None] * len(data["queries"])
    for name, text, instruction in zip(data["queries"]["id"], data["queries"]["text"], instructions, strict=True):
        if not (judged := relevant.get(name)):
            continue
        if not isinstance(text, str):
            raise InvalidInput(location, found="a conversation as a query", expected="queries that are texts")
        candidates = None if top_ranked is None else list(dict.fromkeys(top_ranked.get(name, ())))
        if candidates is not None and not candidates:
            raise InvalidInput(f"{location}: query {name}", found="no text to rank", expected="at least one candidate")
        query_text = name if is_own_text_ignored else None  # A text with the name of the query is the query itself.
        gains = {each: float(gain) for each, gain in judged.items() if gain > 0}
        ranked = position if candidates is None else candidates
        reachable = [each for each in gains if each in ranked and each != query_text]
        documents.append(
            RankedQuery(
                {
                    "id": name,
                    "query": text if instruction is None else f"{text} {instruction}",
                    "relevance": dict(sorted(gains.items())),
                    "candidates": candidates,
                    "corpus": content.hexdigest(),
                },
                texts,
                {position[each]: gains[each] for each in reachable},
                None if candidates is None else [position[each] for each in candidates if each != query_text],
                lost_gains=[gain for each, gain in gains.items() if each not in reachable],
                own_text=position.get(query_text) if query_text is not None and candidates is None else None,
            )
        )
    if not documents:
        raise InvalidInput(location, found="no query with a relevant text", expected="queries")
    return documents


def _corpus_texts(corpus: Any) -> list[str]:
    """Return the texts that a model reads: the title, if there is one, and the text."""
    titles = corpus["title"] if "title" in corpus.column_names else [""] * len(corpus)
    return [
        f"{title} {text}".strip() if title else text.strip() for title, text in zip(titles, corpus["text"], strict=True)
    ]
