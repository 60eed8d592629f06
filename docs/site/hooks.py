"""What MkDocs does with the pages of docs/ beside rendering them.

Links that leave docs/ lead to examples, configs and measurements. Each file that a page links to
gets a page of its own under source/; in the repository the same links lead to the files themselves.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parent.parent.parent
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)")
API_NAME = re.compile(r"`(jaxgrpo(?:\.\w+)+)`")
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sbatch": "bash"}
PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md")
"""Pages of the navigation that lie outside docs/."""


def page_name(path: str) -> str:
    """The page of a path of the repository, relative to docs/."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def links(text: str, path: str) -> Iterator[str]:
    """The files and folders of the repository outside docs/ that the page `path` links to."""
    for target in LINK.findall(text):
        place = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if not place.startswith("docs/") and (REPOSITORY / place).exists():
            yield place


def rewritten(text: str, path: str) -> str:
    """The text of a page whose links lead to pages of the site."""
    name = page_name(path)

    def link(match: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        inside = path.startswith("docs/") and place.startswith("docs/")
        if inside or not (REPOSITORY / place).exists():
            return match[1]
        return posixpath.relpath(page_name(place), posixpath.dirname(name) or ".")

    return LINK.sub(link, text)


def source_page(path: str) -> str:
    """A page that shows a file of the repository, or lists the Markdown files of a folder."""
    place = REPOSITORY / path
    if place.is_dir():
        names = sorted(file.name for file in place.glob("*.md"))
        return f"# {path}\n\n" + "".join(f"- [{name}]({place.name}/{name})\n" for name in names)
    if place.suffix == ".md":
        return place.read_text()
    language = LANGUAGES.get(place.suffix, "text")
    title = f"# {place.name}\n\n`{path}` in the repository:\n\n"
    return f"{title}````{language}\n{place.read_text()}````\n"


def with_links_to_the_api(text: str) -> str:
    """Names such as `jaxgrpo.train` in the prose lead to the API, where it has them."""
    parts = FENCE.split(text)
    link = r'<autoref identifier="\1" optional><code>\1</code></autoref>'
    return "".join(part if i % 2 else API_NAME.sub(link, part) for i, part in enumerate(parts))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of what lies outside docs/."""
    queue: list[str] = [*PROJECT]
    for file in files.documentation_pages():
        queue += links(file.content_string, f"docs/{file.src_uri}")
    visited: set[str] = set()
    while queue:
        path = queue.pop()
        if path not in visited:
            visited.add(path)
            text = source_page(path)
            queue += links(text, path)
            files.append(File.generated(config, page_name(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files into links to pages. Pages that show code stay as they are."""
    name = page.file.src_uri
    path = name.removeprefix("source/") if name.startswith("source/") else f"docs/{name}"
    if not (REPOSITORY / path).is_file():
        return markdown
    return with_links_to_the_api(rewritten(markdown, path))


def on_post_build(config: MkDocsConfig) -> None:
    """Takes out the addresses from which the theme would load scripts.

    They are for diagrams, which no page has, and for browsers older than 2020.
    """
    for script in Path(config.site_dir).glob("assets/javascripts/bundle.*.js"):
        script.write_text(script.read_text("utf-8").replace("https://unpkg.com/", ""), "utf-8")
