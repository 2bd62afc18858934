"""A hook of mkdocs. It adds the pages that lie outside of docs/ to the site, and turns links between files of
the repository, as GitHub follows them, into links between pages."""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Weights of pages in the search. A word of a heading counts a thousand times there, so records of our work,
# whose headings are sentences, would stand before the pages that explain a thing.
BOOSTS = {"options.md": 2.0, "cli.md": 2.0, "performance.md": 0.3}
RECORD_BOOST = 0.001
RECORDS = ("benchmarks/", "decisions/", "howto/", "architecture.md", "CONTRIBUTING.md")
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def outside() -> dict[str, str]:
    """Pages outside of docs/, by their path in the repository: their place on the site."""
    results = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "benchmarks/results").glob("*.md"))]
    return {path: path for path in ["CONTRIBUTING.md", "examples/README.md", *results]} | {
        "README.md": "index.md"
    }


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, uri in outside().items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A link from file to file of the repository becomes one from page to page, or one to the repository."""
    uri = page.file.src_uri
    page.meta["search"] = {"boost": RECORD_BOOST if uri.startswith(RECORDS) else BOOSTS.get(uri, 1.0)}
    own = {place: path for path, place in outside().items()}.get(uri, f"docs/{uri}")

    def rewrite(match: re.Match[str]) -> str:
        start, target, end = match.groups()
        if re.match(r"[a-z]+:|/", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(own), target))
        place = outside().get(path) or path.removeprefix("docs/")
        if files.get_file_from_path(place) is not None:
            target = os.path.relpath(place, posixpath.dirname(uri) or ".")
        elif (ROOT / path).exists():
            target = f"{config.extra['repository']}/blob/main/{path}"
        return start + target + end  # what is neither fails the build, as a broken link

    return LINK.sub(rewrite, markdown)
