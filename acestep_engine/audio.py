"""Sound files and sample rates, through PyAV. Knows no model and no latents.

Dimension key: B songs, X channels, S samples.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor

from .errors import InvalidRequest
from .types import SAMPLE_RATE, Audio

CHUNK = 1 << 16  # samples per frame handed to the codec
FILTER = 64  # samples at the lower rate that the resampler needs, or it gives none at all

# suffix -> (container, codec, sample format, bits per second or None)
FORMATS: dict[str, tuple[str, str, str, int | None]] = {
    ".wav": ("wav", "pcm_s24le", "s32", None),
    ".flac": ("flac", "flac", "s32", None),
    ".mp3": ("mp3", "libmp3lame", "fltp", 320_000),
}
MP3_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)


def check_target(path: str | Path, suffixes: Iterable[str] = FORMATS) -> None:
    """Raise InvalidRequest unless a file `path` with one of `suffixes` can be written.

    Makes its folder.
    """
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise InvalidRequest(
            f"Cannot write '{path}': the suffix '{path.suffix}' names no format known here. "
            f"Use one of {', '.join(suffixes)}."
        )
    if path.is_dir():
        raise InvalidRequest(f"Cannot write '{path}': it is a folder. Choose another file name.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InvalidRequest(
            f"Cannot write into the folder '{path.parent}': {error.strerror}. Choose another one."
        ) from error


def save(audio: Audio, path: str | Path, item: int = 0) -> Path:
    """Write song `item` of `audio`; the format follows the suffix, PCM has 24 bits, MP3 320 kbit/s.

    What has a rate that MP3 lacks becomes 48 kHz there. The file appears whole or not at all: it is
    written under a temporary name and renamed.
    """
    check_target(path)
    path = Path(path)
    container_name, codec, sample_format, bit_rate = FORMATS[path.suffix.lower()]
    if container_name == "mp3" and audio.sample_rate not in MP3_RATES:
        audio = resample(audio)
    pcm_XS = audio.waveform[item].detach().cpu().float().clamp(-1, 1).contiguous().numpy()
    if pcm_XS.shape[0] not in (1, 2):
        raise InvalidRequest(
            f"Cannot write {pcm_XS.shape[0]} channels to '{path}'. Give mono or stereo audio."
        )
    layout = "stereo" if pcm_XS.shape[0] == 2 else "mono"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with av.open(str(temporary), "w", format=container_name) as container:
            stream = container.add_stream(codec, rate=audio.sample_rate)
            assert isinstance(stream, av.AudioStream)
            stream.layout = layout
            stream.format = sample_format
            if bit_rate:
                stream.bit_rate = bit_rate
            resampler = av.AudioResampler(sample_format, layout, audio.sample_rate)
            for frame in _frames(pcm_XS, audio.sample_rate, layout):
                for packed in resampler.resample(frame):
                    container.mux(stream.encode(packed))
            for packed in resampler.resample(None):
                container.mux(stream.encode(packed))
            container.mux(stream.encode(None))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def load(path: str | Path) -> Audio:
    """Decode a sound file at its own rate and channel count, (1, X, S)."""
    try:
        with av.open(str(path)) as container:
            if not container.streams.audio:
                raise InvalidRequest(f"'{path}' holds no sound. Choose an audio file.")
            stream = container.streams.audio[0]
            converter = av.AudioResampler("fltp")
            parts = [
                part.to_ndarray()
                for frame in container.decode(stream)
                for part in converter.resample(frame)
            ]
            rate = stream.rate
    except (av.FFmpegError, OSError) as error:
        raise InvalidRequest(
            f"Cannot read '{path}' as sound: {error}. Choose a WAV, FLAC, MP3, OGG or M4A file."
        ) from error
    if not parts:
        raise InvalidRequest(f"'{path}' holds no sound samples. Choose another file.")
    return Audio(torch.from_numpy(np.concatenate(parts, axis=1))[None].float(), rate)


def resample(audio: Audio, rate: int = SAMPLE_RATE) -> Audio:
    """`audio` at `rate`, exactly round(S * rate / sample_rate) samples long, but never of none."""
    if audio.sample_rate == rate or audio.waveform.shape[-1] == 0:
        return replace(audio, sample_rate=rate)
    samples = audio.waveform.shape[-1]
    target = max(1, round(samples * rate / audio.sample_rate))
    songs = [
        _resample_channels(song_XS, audio.sample_rate, rate, target) for song_XS in audio.waveform
    ]
    return Audio(torch.stack(songs), rate, audio.gain)


def _resample_channels(song_XS: Tensor, source: int, rate: int, target: int) -> Tensor:
    rows = []
    lacking = max(0, FILTER * -(-source // rate) - song_XS.shape[1])
    for channel_S in song_XS:  # one by one, so that any number of channels works
        pcm = np.ascontiguousarray(channel_S.detach().cpu().float().numpy()[None])
        pcm = np.pad(pcm, ((0, 0), (0, lacking)), "edge") if lacking else pcm
        resampler = av.AudioResampler("fltp", "mono", rate)
        parts = [
            out.to_ndarray()[0]
            for frame in [*_frames(pcm, source, "mono"), None]
            for out in resampler.resample(frame)
        ]
        row = torch.from_numpy(np.concatenate(parts))[:target]
        rows.append(torch.nn.functional.pad(row, (0, target - row.shape[0])))
    return torch.stack(rows)


def to_stereo(audio: Audio) -> Audio:
    """Mono is doubled; of more than two channels the first two are kept."""
    channels = audio.waveform.shape[1]
    if channels == 1:
        return replace(audio, waveform=audio.waveform.expand(-1, 2, -1))
    return replace(audio, waveform=audio.waveform[:, :2])


def _frames(pcm_XS: np.ndarray, rate: int, layout: str) -> Iterator[av.AudioFrame]:
    for start in range(0, pcm_XS.shape[1], CHUNK):
        chunk = np.ascontiguousarray(pcm_XS[:, start : start + CHUNK])
        frame = av.AudioFrame.from_ndarray(chunk, format="fltp", layout=layout)
        frame.sample_rate = rate
        frame.pts = start
        yield frame
