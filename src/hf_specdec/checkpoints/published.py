"""Find published draft heads for a model on the Hub, by names and by the tag of the base model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from hf_specdec.checkpoints.target_config import first_sentence
from hf_specdec.errors import CheckpointFormatError, InvalidConfigError

METHOD_BY_WORD = {
    "eagle": "eagle", "hass": "eagle", "medusa": "medusa", "dflash": "dflash", "jetspec": "dflash", "dspark": "dflash",
    "mtp": "mtp", "pard": "pard", "speculator": "eagle",
}  # fmt: skip
"""Method that a word in a repository's name stands for; the first that occurs counts."""

MOST = 200
"""Maximum number of repositories of each search."""


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """A repository whose name says that it holds a draft head.

    Args:
        repo_id: Hub id.
        method: Value of `speculative=`; for `"pard"` the repository is passed as `assistant_model=`.
        downloads: Downloads in the last 30 days.
    """

    repo_id: str
    method: str
    downloads: int


def find_heads(target: str) -> list[PublishedHead]:
    """Return the draft heads on the Hub that are tagged with a base model or have its name in theirs.

    Files are not read: `hf-specdec inspect` and `load_drafter` check whether a head fits.

    Args:
        target: Hub id of the model, such as `"meta-llama/Llama-3.1-8B-Instruct"`.

    Returns:
        Heads, those with the most downloads first.

    Raises:
        InvalidConfigError: `target` is not a Hub id.
        CheckpointFormatError: The Hub cannot be reached.
    """
    try:
        validate_repo_id(target)
    except HFValidationError as error:
        raise InvalidConfigError(
            f"{target!r} is not a Hub id: {first_sentence(error)}", "Give the model's id, such as org/name."
        ) from error
    api, name = HfApi(), target.rpartition("/")[2]
    try:
        found = {
            model.id: model.downloads or 0
            for search in ({"filter": f"base_model:{target}"}, {"search": name})
            for model in api.list_models(**search, limit=MOST, sort="downloads")  # type: ignore[arg-type]
        }
    except Exception as error:  # huggingface_hub's errors, or its HTTP library's, which depend on the version
        raise CheckpointFormatError(
            f"The Hub at {api.endpoint} cannot be searched: {first_sentence(error)}",
            "Try again with a connection to it, or search for heads in a browser.",
        ) from error
    return _heads(found.items())


def _heads(found: Iterable[tuple[str, int]]) -> list[PublishedHead]:
    heads = []
    for repo_id, downloads in found:
        words = [word for word in METHOD_BY_WORD if word in repo_id.lower()]
        if words:
            heads.append(PublishedHead(repo_id, METHOD_BY_WORD[words[0]], downloads))
    return sorted(heads, key=lambda head: (-head.downloads, head.repo_id))
