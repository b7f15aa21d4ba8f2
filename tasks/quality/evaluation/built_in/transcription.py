"""Transcribe recordings: the built-in task of speech models.

A document is a recording with its transcript. Its score is an error rate: the smallest number of insertions, deletions
and substitutions that turn the reference transcript into the model's, divided by the number of words (``wer``) or of
characters (``cer``) in the reference. A rate above 1 counts as 1, so a recording on which a model repeats itself does
not outweigh many others.

The gate compares the mean over recordings. Recordings are independent observations, and the words of one recording are
not. Published word error rates divide all errors by all words, which gives long recordings more weight.

A recording is read as one channel at the sampling rate of the model. SciPy reads WAV files. Other formats, such as FLAC
and Ogg, need the package ``soundfile``. Channels are averaged. If a recording has another sampling rate, a polyphase
filter resamples it (``scipy.signal.resample_poly``: a finite impulse response with a Kaiser window, beta 5, which
suppresses frequencies above the lower of both Nyquist frequencies).
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import math
import re
import struct
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mergegate.merge_core.architecture import TaskForm
from mergegate.merge_core.errors import InvalidInput, pip_command
from mergegate.merge_core.parsing import LocalPath, parse_line, plain_file, read_lines, read_plain
from mergegate.tasks.quality.evaluation.built_in.contract import BuiltInScore, BuiltInTask, TaskDocument

if TYPE_CHECKING:
    from mergegate.tasks.models.checkpoints import LoadedModel, TellProgress

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
        return self.marks_padding or self.seconds is not None

    def require_short(self, path: Path, seconds: float) -> None:
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
    """
    import torch

    from mergegate.tasks.models.checkpoints import is_out_of_memory

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


_APOSTROPHES = "'\u2019\u02bc"  # typewriter, right quotation mark, modifier letter


def normalize_words(text: str) -> str:
    """Return ``text`` in the form in which transcripts are compared, version 1 of the rule.

    Compatibility characters get their usual form (NFKC), letters become lower case (case folding), and a space replaces
    each punctuation mark and symbol. An apostrophe between two letters stays, written as ``'``. Accents and vowel signs
    stay, because they distinguish words. Numbers are not spelled out.
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    characters = []
    for at, character in enumerate(text):
        if character in _APOSTROPHES and text[at - 1 : at].isalpha() and text[at + 1 : at + 2].isalpha():
            characters.append("'")
        else:
            characters.append(" " if unicodedata.category(character)[0] in "PS" else character)
    return " ".join("".join(characters).split())


def share_of_errors(reference: Sequence[str], transcript: Sequence[str]) -> float:
    """Return the number of errors in a transcript, divided by the length of the reference, at most 1.

    If the reference is empty, an empty transcript scores 0 and any other scores 1.
    """
    return min(1.0, edit_distance(reference, transcript) / max(1, len(reference)))


def edit_distance(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the smallest number of insertions, deletions and substitutions that turn one sequence into the other.

    The table of distances has a row for each item of ``first`` and a column for each item of ``second``. Bit ``i`` of
    ``rises`` and ``falls`` tells whether the distance increases or decreases from row ``i`` to row ``i + 1`` in the
    current column, and bit ``i`` of ``gains`` and ``drops`` whether it does from this column to the next in row
    ``i + 1``. A few operations on integers then compute a column (Hyyrö 2001, Explaining and Extending the
    Bit-parallel Approximate String Matching Algorithm of Myers).
    """
    if not first:
        return len(second)
    positions: dict[str, int] = {}
    for at, item in enumerate(first):
        positions[item] = positions.get(item, 0) | 1 << at
    full, last = (1 << len(first)) - 1, 1 << (len(first) - 1)
    rises, falls, distance = full, 0, len(first)
    for item in second:
        equal = positions.get(item, 0)
        diagonal = (((equal & rises) + rises) ^ rises) | equal | falls
        gains, drops = falls | (full & ~(diagonal | rises)), rises & diagonal
        distance += bool(gains & last) - bool(drops & last)
        gains, drops = gains << 1 | 1, drops << 1
        rises, falls = full & (drops | ~(diagonal | gains)), full & gains & diagonal
    return distance


MAX_BYTES = 1 << 30
_MAX_RATE = 384_000
# Exceptions of SciPy and soundfile for damaged files. A warning becomes an exception if samples are missing, and SciPy
# raises UnboundLocalError for a file without samples.
_READ_ERRORS = (
    ValueError,
    TypeError,
    IndexError,
    ArithmeticError,
    RuntimeError,
    EOFError,
    NameError,
    struct.error,
    Warning,
)


def decode_audio(path: Path, content: bytes) -> tuple[NDArray[np.float64], int]:
    """Return the samples of a recording with one channel, mostly in [-1, 1], and their rate in Hz.

    ``content`` are the bytes of the file at ``path``.
    """
    is_wave = content[:4] in (b"RIFF", b"RIFX", b"RF64") and content[8:12] == b"WAVE"
    if not is_wave and importlib.util.find_spec("soundfile") is None:
        raise InvalidInput(
            str(path),
            found="a recording that is not a WAV file",
            expected="WAV, or the package that reads other formats",
            remedy=pip_command("soundfile"),
        )
    try:
        samples, rate = (_read_wave if is_wave else _read_other)(content)
    except _READ_ERRORS as error:
        cause = "" if isinstance(error, NameError) else f": {' '.join(str(error).split())[:200]}"
        raise InvalidInput(
            str(path),
            found=f"cannot be read{cause}",
            expected="a complete recording, for example a WAV file with integer or float samples",
        ) from error
    if not 0 < rate <= _MAX_RATE:
        raise InvalidInput(str(path), found=f"a sampling rate of {rate} Hz", expected=f"1 to {_MAX_RATE} Hz")
    mono = samples.mean(axis=1) if samples.ndim > 1 else samples
    if not mono.size or not np.isfinite(mono).all():
        raise InvalidInput(
            str(path),
            found="samples that are not finite" if mono.size else "no samples",
            expected="a recording with sound",
        )
    return mono, rate


def read_audio(path: Path, rate: int) -> NDArray[np.float32]:
    """Return the samples of a recording, mostly in [-1, 1], at ``rate`` samples per second."""
    samples, own_rate = decode_audio(path, read_plain(path, MAX_BYTES))
    if own_rate != rate:
        from scipy.signal import resample_poly

        shared = math.gcd(rate, own_rate)
        samples = resample_poly(samples, rate // shared, own_rate // shared)
    return samples.astype(np.float32)


def _read_wave(content: bytes) -> tuple[NDArray[np.float64], int]:
    """Return the samples of a WAV file, ``[samples]`` or ``[samples, channels]``, and their rate in Hz."""
    from scipy.io import wavfile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", wavfile.WavFileWarning)  # Ignore unknown chunks.
        warnings.filterwarnings("error", "Reached EOF|Incomplete", wavfile.WavFileWarning)
        rate, samples = wavfile.read(io.BytesIO(content))
    if samples.dtype.kind == "u":  # 8-bit samples are unsigned.
        return samples / 128.0 - 1.0, int(rate)
    if samples.dtype.kind == "i":  # SciPy stores 24-bit samples in the upper bits of int32.
        return samples / float(-int(np.iinfo(samples.dtype).min)), int(rate)
    return samples.astype(np.float64), int(rate)


def _read_other(content: bytes) -> tuple[NDArray[np.float64], int]:
    import soundfile

    samples, rate = soundfile.read(io.BytesIO(content), dtype="float64")
    return samples, int(rate)
