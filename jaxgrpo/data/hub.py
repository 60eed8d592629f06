"""Names on the Hugging Face hub, and what its library's errors mean for whoever gave the name.

A name is used because the user wrote it; nothing else here reaches the network.
"""

from __future__ import annotations

import re
from pathlib import Path

from jaxgrpo.core.errors import InputError

NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")
DATA_SET = "data set"


def is_name(text: str) -> bool:
    """Whether a text has the form of a name on the hub, owner/name.

    >>> is_name("Qwen/Qwen3-0.6B"), is_name("./runs/base"), is_name("base")
    (True, False, False)
    """
    return NAME.fullmatch(text) is not None


def fetch_model(name: str, revision: str | None = None) -> Path:
    """The folder of a model of the hub, fetched where the cache does not hold it.

    Raises: InputError with the cause and the remedy.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(MODEL_FILES)))
    except Exception as error:  # the hub's library raises a dozen kinds
        raise InputError(explain("model.path", "model", name, error, revision)) from error


def explain(
    where: str, kind: str, name: str, error: BaseException, revision: str | None = None
) -> str:
    """What went wrong with a name on the hub, in one line that ends with what to do.

    Args:
      where: the key that gave the name.
      kind: "model" or DATA_SET.
    """
    from huggingface_hub import constants

    start = f"{where} = {name!r} is no local path, and as a {kind} on the hub "
    kinds = {cls.__name__ for seen in _causes(error) for cls in type(seen).__mro__}
    text = " ".join(str(error).split())
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == DATA_SET else ''}{name}"
    if "GatedRepoError" in kinds or "is a gated" in text:
        return start + (
            f"it is gated: accept its terms at {page}, then log in with `hf auth login` or set "
            "HF_TOKEN"
        )
    if "RevisionNotFoundError" in kinds:
        return start + f"it has no revision {revision!r}: name a branch, tag or commit of {page}"
    if kinds & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        return start + (
            "it does not exist, or is private: check the name, or log in with `hf auth login` or "
            "set HF_TOKEN"
        )
    if kinds & {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectionError"}:
        cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub is out of reach"
        repo_type = " --repo-type dataset" if kind == DATA_SET else ""
        return start + (
            f"it is not in the local cache, and {cause}: give a local path, or run `hf download "
            f"{name}{repo_type}` where there is a network"
        )
    return start + (
        f"it could not be fetched ({type(error).__name__}: {text}): check the name, or give a "
        "local path"
    )


def _causes(error: BaseException | None) -> list[BaseException]:
    """An error and what it was raised from, the error first."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
