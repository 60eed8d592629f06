"""Checks a built site: a page may load nothing from elsewhere.

    python docs/site/check.py site     (make site)

Links that a reader follows may lead anywhere. What a browser loads by itself may not: scripts,
styles, fonts, pictures, frames. Exits with 1 if something is loaded from another host.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

ELSEWHERE = re.compile(r"^\s*(?:[a-z]+:)?//", re.IGNORECASE)
LOADED_BY_CSS = re.compile(r"(?:url\(|@import)\s*[\"']?\s*((?:https?:)?//[^\"')\s]+)")
NO_LOAD = {"canonical", "next", "prev", "author", "license"}
"""What a <link> may be without being loaded."""
HOSTS = re.compile(
    r"https?://(?:[\w-]+\.)*(?:unpkg|jsdelivr|cdnjs|cloudflare|googleapis)\.\w+[\w./@-]*"
)
"""Addresses in a script from which it may load another one."""


class Loads(HTMLParser):
    """Collects the addresses that a page loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called for every tag."""
        named = {name: value or "" for name, value in attrs}
        if tag != "a":
            self.addresses += [named[name] for name in ("src", "poster", "data") if name in named]
            self.addresses += [
                part.split()[0] for part in named.get("srcset", "").split(",") if part
            ]
        if tag == "link" and named.get("rel", "").lower() not in NO_LOAD:
            self.addresses.append(named.get("href", ""))
        self.addresses += LOADED_BY_CSS.findall(named.get("style", ""))


def problems(file: Path) -> Iterator[str]:
    """What a file of the site loads from elsewhere."""
    text = file.read_text("utf-8")
    if file.suffix != ".html":
        yield from (LOADED_BY_CSS if file.suffix == ".css" else HOSTS).findall(text)
        return
    page = Loads()
    page.feed(text)
    yield from filter(ELSEWHERE.match, page.addresses)
    for style in re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL):
        yield from LOADED_BY_CSS.findall(style)


def check(site: Path) -> list[str]:
    """Every load from elsewhere of a site: "page: address"."""
    files = sorted(file for file in site.rglob("*") if file.suffix in (".html", ".css", ".js"))
    return [
        f"{file.relative_to(site)}: {problem}" for file in files for problem in problems(file)
    ] + ["no page"] * (not files)


if __name__ == "__main__":
    loads = check(Path(sys.argv[1]))
    sys.stdout.write("".join(f"loaded from elsewhere: {line}\n" for line in loads))
    sys.exit(1 if loads else 0)
