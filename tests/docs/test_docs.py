"""The documents hold: links lead somewhere, Python in them is Python."""

from __future__ import annotations

import pathlib
import re

import pytest
from markdown_it import MarkdownIt

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(path):
    return path.relative_to(ROOT).as_posix()


def tokens(path):
    return MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))


def links(path):
    for token in tokens(path):
        for child in token.children or ():
            for key in ("href", "src"):
                if child.attrGet(key) is not None:
                    yield str(child.attrGet(key))


def anchors(path):
    """The names that headings get where Markdown is shown."""
    found = tokens(path)
    for at, token in enumerate(found):
        if token.type == "heading_open":
            words = "".join(child.content for child in found[at + 1].children or ())
            yield re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_somewhere(path):
    for link in links(path):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path

        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in set(anchors(target)), f"{link}: no such heading"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_python_is_python(path):
    for token in tokens(path):
        if token.type == "fence" and token.info.split()[:1] == ["python"]:
            compile(token.content, f"{name(path)}:{(token.map or [0])[0] + 1}", "exec")


def test_every_page_can_be_reached():
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in reached:
            continue
        reached.add(page)
        here = [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if ":" not in link]
        left += [target for target in here if target.suffix == ".md" and target.exists()]

    assert set(PAGES) <= reached
