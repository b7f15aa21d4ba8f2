"""Transcribe recordings: the built-in task of speech models.

A document is a recording with its transcript. Its score is an error rate: the smallest number of insertions, deletions
and substitutions that turn the reference transcript into the model's, divided by the number of words (``wer``) or of
characters (``cer``) in the reference. A rate above 1 counts as 1, so a recording on which a model repeats itself does
not outweigh many others.

The gate compares the mean over recordings. Recordings are independent observations, and the words of one recording are
not. Published word error rates divide all errors by all words, which gives long recordings more weight.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from mergegate.merge_core.architecture import TaskForm
from mergegate.merge_core.errors import InvalidInput, pip_command
from mergegate.merge_core.parsing import LocalPath, parse_line, plain_file, read_lines, read_plain
from mergegate.tasks.evaluation.built_in.audio import MAX_BYTES, decode_audio, read_audio
from mergegate.tasks.evaluation.built_in.contract import BuiltInScore, BuiltInTask, TaskDocument
from mergegate.tasks.evaluation.built_in.error_rates import normalize_words, share_of_errors

if TYPE_CHECKING:
    from mergegate.tasks.checkpoints import LoadedModel, TellProgress

_LONGEST_LINE = 1 << 20
_MOST_LINES = 1_000_000
_MAX_ANSWER = 2000
_MISSING_PACKAGE = re.compile(r"requires the (\w+) library")  # in errors of transformers


class TranscriptionTask(BuiltInTask):
    """Transcription task: a speech model transcribes each recording.

    A document is ``{"audio": file, "text": transcript}``. Further fields may name clusters, such as the speaker.
    """

    kind: Literal["transcription"]
    data: LocalPath = Field(
        description="File with one JSON object per line: audio (a file relative to this one), text (its transcript)."
    )
    metric: Literal["wer", "cer"] = Field(
        default="wer",
        description="wer: errors per word. cer: errors per character, for languages without spaces. Default: wer.",
    )
    language: str | None = Field(
        default=None,
        min_length=1,
        description="Language of the recordings, such as en, for models that transcribe several. Default: the model "
        "detects it.",
    )
    # The number is the version of the rule: another rule gets another number, and so another cache key.
    normalization: Literal["words-1", "none"] = Field(
        default="words-1",
        description="words-1: compare transcripts in lower case, without punctuation. none: compare exact texts.",
    )

    form: ClassVar[TaskForm] = "transcription"
    libraries: ClassVar[tuple[str, ...]] = ("numpy", "scipy")

    @property
    def name(self) -> str:
        return self.data.stem

    @property
    def judged_by(self) -> str:
        return self.metric

    @property
    def metrics(self) -> Mapping[str, bool]:
        return {"wer": False, "cer": False}

    def resolve(self, root: Path) -> Self:
        return self.model_copy(update={"data": plain_file((root / self.data).absolute())})

    def files(self) -> tuple[Path, ...]:
        recordings = (self.data.parent / line["audio"] for line in self._lines())
        return (self.data, *dict.fromkeys(recordings))

    def documents(self) -> Sequence[TaskDocument]:
        documents: list[TaskDocument] = []
        names: dict[str, str] = {}
        for line in self._lines():
            content = read_plain(path := self.data.parent / line["audio"], MAX_BYTES)
            samples, rate = decode_audio(path, content)
            sha256 = hashlib.sha256(content).hexdigest()
            # Copies of a recording get the name of the first one, so that they count as one observation.
            facts = {"audio": names.setdefault(sha256, line["audio"]), "sha256": sha256}
            documents.append({**line, **facts, "seconds": round(len(samples) / rate, 3)})
        return documents

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of ``data``, whose recordings exist."""
        number = 0
        for number, content in read_lines(self.data, longest=_LONGEST_LINE, most=_MOST_LINES):
            line = parse_line(content, self.data, number)
            for key in ("audio", "text"):
                if not isinstance(line.get(key), str):
                    raise InvalidInput(
                        f"{self.data}: line {number}: {key}",
                        found=f"{line.get(key)!r:.60}" if key in line else "no such field",
                        expected="the name of a file" if key == "audio" else "the transcript of the recording",
                    )
            try:
                plain_file(self.data.parent / line["audio"])
            except FileNotFoundError:
                raise InvalidInput(
                    f"{self.data}: line {number}: audio",
                    found=f"{line['audio']}, which does not exist",
                    expected="a file relative to the directory of this one",
                ) from None
            yield line
        if not number:
            raise InvalidInput(str(self.data), found="an empty file", expected="one recording per line")

    def check_model(self, name: str, directory: Path, documents: Sequence[TaskDocument]) -> None:
        from transformers import AutoProcessor

        try:
            speech = _SpeechInput.of(AutoProcessor.from_pretrained(str(directory), trust_remote_code=False), name)
            sound = read_audio(self.data.parent / documents[0]["audio"], speech.rate)
            speech.extractor([sound], sampling_rate=speech.rate, return_tensors="pt")
        except InvalidInput:
            raise
        except Exception as error:  # transformers promises no set of types
            packages = sorted(set(_MISSING_PACKAGE.findall(str(error)))) if isinstance(error, ImportError) else []
            raise InvalidInput(
                f"{name}: its processor",
                found=f"it needs {' and '.join(packages)}, which is not installed"
                if packages
                else f"cannot be used: {' '.join(str(error).split())[:300]}",
                expected="a processor that prepares recordings for the model (preprocessor_config.json)",
                remedy=pip_command(*packages)
                if packages
                else "download or copy the files of the processor from the base model",
            ) from error
        longest = max(documents, key=lambda document: float(document["seconds"]))
        speech.require_short(self.data.parent / longest["audio"], longest["seconds"])

    def prompt_of(self, document: TaskDocument) -> str:
        return str(document["audio"])

    def target_of(self, document: TaskDocument) -> str:
        return str(document["text"])

    def score(
        self, model: LoadedModel, documents: Sequence[TaskDocument], batch_size: int, on_progress: TellProgress
    ) -> Iterator[BuiltInScore]:
        recordings = (self.data.parent / document["audio"] for document in documents)
        transcripts = _transcribe(model, recordings, batch_size, self.language)
        for done, (document, transcript) in enumerate(zip(documents, transcripts, strict=True), 1):
            reference, answer = (self._normalize(text) for text in (str(document["text"]), transcript.text))
            on_progress(done, len(documents))
            yield BuiltInScore(
                {
                    "wer": share_of_errors(reference.split(), answer.split()),
                    "cer": share_of_errors("".join(reference.split()), "".join(answer.split())),
                },
                answer=transcript.text.strip()[:_MAX_ANSWER],
                # Do not suggest a larger budget: the limit is a property of the model.
                ended="" if transcript.tokens is None else "context" if transcript.is_cut_off else "eos",
                tokens=transcript.tokens,
            )

    def _normalize(self, text: str) -> str:
        return text if self.normalization == "none" else normalize_words(text)


class _SpeechInput(NamedTuple):
    """Settings of a processor that prepares recordings for a model."""

    extractor: Any
    rate: int  # samples per second
    seconds: float | None  # length to which each recording is padded with silence (Whisper); None: no fixed length
    marks_padding: bool  # whether the attention mask shows where a recording of a batch ends

    @classmethod
    def of(cls, processor: Any, name: str) -> _SpeechInput:
        """Return the settings of a processor of transformers. ``name`` is that of the model.

        Raises:
            InvalidInput: The processor declares no sampling rate.
        """
        extractor = getattr(processor, "feature_extractor", processor)
        rate, window = getattr(extractor, "sampling_rate", None), getattr(extractor, "n_samples", None)
        if not isinstance(rate, int) or rate < 1:
            raise InvalidInput(
                f"{name}: its processor",
                found="it declares no sampling rate, so it does not prepare recordings",
                expected="a speech model with its preprocessor_config.json",
            )
        return cls(extractor, rate, window and window / rate, bool(getattr(extractor, "return_attention_mask", False)))

    @property
    def ignores_padding(self) -> bool:
        """Whether a padded recording is transcribed as it is alone."""
        return self.marks_padding or self.seconds is not None

    def require_short(self, path: Path, seconds: float) -> None:
        """Raise InvalidInput if a recording is longer than the model processes at a time."""
        if self.seconds and seconds > self.seconds + 1e-3:
            raise InvalidInput(
                str(path),
                found=f"a recording of {seconds:.1f} s",
                expected=f"at most {self.seconds:g} s, the length that the model processes at a time",
                remedy="split it into parts, each with its own transcript",
            )


class _Transcript(NamedTuple):
    text: str
    tokens: int | None = None  # number of generated tokens; None if the model does not generate
    is_cut_off: bool = False  # whether the model reached its limit on tokens before the end of the transcript


def _transcribe(
    model: LoadedModel, recordings: Iterator[Path], batch_size: int, language: str | None
) -> Iterator[_Transcript]:
    """Yield the transcripts of recordings in order.

    In a batch, each recording is padded with silence to the length of the longest one, which must not change its
    transcript. CTC models label each moment of the silence too, and some processors do not mark it. mergegate passes
    one recording at a time to such models.

    Raises:
        InvalidInput: A recording cannot be read, or the model cannot process it.
    """
    import torch

    from mergegate.tasks.checkpoints import is_out_of_memory

    speech = _SpeechInput.of(model.processor, "the model")
    is_ctc = model.kind.loader == "AutoModelForCTC"
    languages = getattr(getattr(model.network, "generation_config", None), "lang_to_id", None)
    if language is not None and not languages:
        raise InvalidInput(
            "evaluate.tasks: language",
            found=f"{language!r}, for a model that does not select languages",
            expected="no language for this model",
        )
    options = {} if language is None else {"language": language, "task": "transcribe"}
    while paths := list(islice(recordings, batch_size if speech.ignores_padding and not is_ctc else 1)):
        sounds = [read_audio(path, speech.rate) for path in paths]
        for path, sound in zip(paths, sounds, strict=True):
            speech.require_short(path, len(sound) / speech.rate)
        try:
            padding = {} if speech.seconds else {"padding": True}
            inputs = speech.extractor(sounds, sampling_rate=speech.rate, return_tensors="pt", **padding)
            inputs = inputs.to(model.network.device, model.network.dtype)
            with torch.inference_mode():
                if is_ctc:
                    labels = model.network(**inputs).logits.argmax(-1)
                    transcripts = [_Transcript(text) for text in model.processor.batch_decode(labels)]
                else:
                    settings = {**options, "do_sample": False, "return_dict_in_generate": True}
                    transcripts = _read_transcripts(
                        model, model.network.generate(**inputs, **settings).sequences.tolist()
                    )
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
            if is_out_of_memory(error):
                raise
            raise InvalidInput(
                f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else str(paths[0]),
                found=f"the model cannot transcribe it: {' '.join(str(error).split())[:300] or type(error).__name__}",
                expected="a recording, and settings of the task, that the model supports",
            ) from error
        yield from transcripts


def _read_transcripts(model: LoadedModel, sequences: Sequence[Sequence[int]]) -> list[_Transcript]:
    """Return the transcripts in sequences of tokens. The first token is the decoder start token."""
    ends = model.network.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    transcripts = []
    for ids, text in zip(sequences, model.processor.batch_decode(sequences, skip_special_tokens=True), strict=True):
        count = next((at for at, token in enumerate(ids) if at and token in ends), None)
        transcripts.append(_Transcript(text, len(ids) - 1 if count is None else count, count is None))
    return transcripts
