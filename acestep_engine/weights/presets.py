"""Models by name: the official repositories on Hugging Face, and where their files go.

Loads nothing and needs the network only in `download`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from ..errors import BadCheckpoint, ModelNotFound
from ..types import ModelSpec
from . import sources
from .parts import MAIN_REPO, PARTS, ROLES

LMSize = Literal["0.6B", "1.7B", "4B"]
FILES = ("*.safetensors", "*.json", "*.txt", "silence_latent.pt")  # no remote code


@dataclass(frozen=True, slots=True)
class Preset:
    """A DiT folder and a language model; text encoder and VAE are the same for all."""

    dit: str
    lm: LMSize
    about: str


@dataclass(frozen=True, slots=True)
class Download:
    """Files of one repository, and the folder they go to, below the one for all models."""

    repo: str
    patterns: tuple[str, ...]
    folder: str = ""


PRESETS: dict[str, Preset] = {
    "turbo": Preset("acestep-v15-turbo", "1.7B", "2B, 8 steps: the one to begin with"),
    "turbo-0.6b-lm": Preset("acestep-v15-turbo", "0.6B", "2B, 8 steps, small language model"),
    "turbo-4b-lm": Preset("acestep-v15-turbo", "4B", "2B, 8 steps, large language model"),
    "sft": Preset("acestep-v15-sft", "1.7B", "2B, 50 steps with guidance"),
    "base": Preset(
        "acestep-v15-base", "1.7B", "2B, 50 steps with guidance, for training and edits"
    ),
    "xl-turbo": Preset("acestep-v15-xl-turbo", "1.7B", "4B, 8 steps"),
    "xl-sft": Preset("acestep-v15-xl-sft", "1.7B", "4B, 50 steps with guidance"),
    "xl-base": Preset("acestep-v15-xl-base", "1.7B", "4B, 50 steps with guidance"),
}
_IN_MAIN = ("acestep-v15-turbo", "acestep-5Hz-lm-1.7B")  # folders of the main repository


def files_of(name: str) -> list[Download]:
    """What preset `name` is made of, repository by repository."""
    own = (PRESETS[name].dit, _lm_folder(name))
    main = (PARTS["vae"].official, PARTS["text_encoder"].official)
    main += tuple(folder for folder in own if folder in _IN_MAIN)
    patterns = tuple(f"{folder}/{pattern}" for folder in main for pattern in FILES)
    others = [Download(f"ACE-Step/{folder}", FILES, folder) for folder in own if folder not in main]
    return [Download(MAIN_REPO, patterns), *others]


def spec_of(name: str, folder: str | Path) -> ModelSpec:
    """The paths of preset `name` below `folder`, whether or not they are there."""
    root = Path(folder).expanduser()
    return ModelSpec(
        dit=str(root / PRESETS[name].dit),
        text_encoder=str(root / PARTS["text_encoder"].official),
        lm=str(root / _lm_folder(name)),
        vae=str(root / PARTS["vae"].official),
    )


def locate(name: str, folder: str | Path) -> ModelSpec:
    """Preset `name` below `folder`; an error that says how to get it where a part is missing."""
    spec = spec_of(name, folder)
    for role in ROLES:
        try:
            sources.locate(spec, role)
        except (ModelNotFound, BadCheckpoint) as error:
            raise type(error)(
                f"The preset '{name}' is not complete in {folder}: {error} To get all of it: "
                f"python -m acestep_engine download {name}"
            ) from error
    return spec


def download(name: str, folder: str | Path, endpoint: str | None = None) -> Path:
    """Bring all files of preset `name` into `folder`, going on where an earlier try stopped.

    endpoint: address of a mirror. Raises ModelNotFound with what to fetch by hand where it fails.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # its bases hold the connection errors of whichever HTTP client this version is built on
    failures = cast("tuple[type[Exception], ...]", (OSError, *HfHubHTTPError.__bases__))
    root = Path(folder).expanduser()
    for item in files_of(name):
        try:
            snapshot_download(
                item.repo,
                local_dir=root / item.folder,
                allow_patterns=list(item.patterns),
                endpoint=endpoint,
            )
        except failures as error:
            raise ModelNotFound(_by_hand(name, root, item, error)) from error
    try:
        locate(name, root)
    except (
        ModelNotFound,
        BadCheckpoint,
    ) as error:  # without a network an old folder is returned as it is
        raise ModelNotFound(_by_hand(name, root, files_of(name)[0], error.__cause__)) from error
    return root


def _lm_folder(name: str) -> str:
    return f"acestep-5Hz-lm-{PRESETS[name].lm}"


def _by_hand(name: str, root: Path, item: Download, error: BaseException | None) -> str:
    places = "; ".join(
        f"from {each.repo} {_contents(each)} into {root / each.folder}" for each in files_of(name)
    )
    reason = str(error).splitlines()[0].rstrip(".") if error else "unknown"
    return (
        f"The preset '{name}' could not be downloaded; it failed at {item.repo}: {reason}. Check "
        "the connection and run it again, it goes on where it stopped. By hand, from Hugging Face: "
        f"{places}."
    )


def _contents(item: Download) -> str:
    folders = dict.fromkeys(pattern.split("/")[0] for pattern in item.patterns if "/" in pattern)
    return f"the folders {', '.join(folders)}" if folders else "all files"
