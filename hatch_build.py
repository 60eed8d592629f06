"""What the package's metadata says beyond pyproject.toml: its addresses and its description.

The description is README.md, whose links lead to files of the repository. On another page they
would lead nowhere, so they become addresses of this version's files. While pyproject.toml names no
repository, the names of the files take their place: the source distribution has them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ADDRESS = re.compile(r"https://[\w.-]+(/[\w.-]+){2,}")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
WITHOUT_ADDRESS = "\nThe files that this page names are in the source distribution.\n"


class Metadata(MetadataHookInterface):
    """The fields `readme` and `urls`. Raises: ValueError for an address that is none."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository, version = self.config["repository"], metadata["version"]
        if repository and not ADDRESS.fullmatch(repository):
            raise ValueError(
                f"pyproject.toml: tool.hatch.metadata.hooks.custom.repository = {repository!r}: "
                "expected https://HOST/OWNER/NAME"
            )
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = urls(repository, version)
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": description(text, repository, version),
        }


def urls(repository: str, version: str) -> dict[str, str]:
    """The addresses by their label; none while the repository's is not known."""
    if not repository:
        return {}
    return {
        "Source": repository,
        "Documentation": f"{repository}/blob/v{version}/docs/index.md",
        "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def description(text: str, repository: str, version: str) -> str:
    """A page of the repository for readers elsewhere. What stands in a block of code stays."""

    def link(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if repository:
            folder = "raw" if picture else "blob"
            return f"{picture}[{words}]({repository}/{folder}/v{version}/{target})"
        name = target.partition("#")[0]
        return name if words == name else f"{words} ({name})"

    parts = FENCE.split(text)  # code is at the odd places
    pages = "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))
    return pages if repository else f"{pages}{WITHOUT_ADDRESS}"
