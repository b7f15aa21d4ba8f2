"""Read recordings as one channel at the sampling rate of a model.

SciPy reads WAV files. Other formats, such as FLAC and Ogg, need the package ``soundfile``. Channels are averaged. If a
recording has another sampling rate, a polyphase filter resamples it (``scipy.signal.resample_poly``: a finite impulse
response with a Kaiser window, beta 5, which suppresses frequencies above the lower of both Nyquist frequencies).
"""

from __future__ import annotations

import importlib.util
import io
import math
import struct
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergegate.merge_core.errors import InvalidInput, pip_command
from mergegate.merge_core.parsing import read_plain

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

    Raises:
        InvalidInput: The file is damaged, contains no sound, or needs a package that is not installed.
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
    """Return the samples of a recording, mostly in [-1, 1], at ``rate`` samples per second.

    Raises:
        InvalidInput: The file is missing, or see ``decode_audio``.
    """
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
    """Return what ``_read_wave`` does, for a format that ``soundfile`` reads."""
    import soundfile

    samples, rate = soundfile.read(io.BytesIO(content), dtype="float64")
    return samples, int(rate)
