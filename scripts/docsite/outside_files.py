"""Files outside docs/ that pages link to are part of the site: contributing, the changelog, and examples as code."""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

_LINK = re.compile(r"(?<=\]\()(?!\w+:)([^()\s#]+)(?=[#)])")
_NAMED = re.compile(r"\[[\w./-]+\.md\]\(([^()\s#]+\.md)")  # a link whose text is the name of the page
_TITLE = re.compile(r"^# (.*)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to, each with its place in the navigation."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    linked = {path for file in files.documentation_pages() for path in _linked(file)}
    listed = sorted(path for path in linked if not path.startswith("docs/") and path not in PAGES)
    for path in listed:
        files.append(File.generated(config, _page_of(path), content=_listing(path)))
    config.nav[-1]["Contributing"].append({"Files": [{path: _page_of(path)} for path in listed]})
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point relative links, which hold in the repository, to pages of the site, and call pages by their titles."""
    here = posixpath.dirname(page.file.src_uri) or "."

    def titled(link: re.Match[str]) -> str:
        path = _path_of(link[1], page.file)
        title = _TITLE.search((ROOT / path).read_text()) if path else None
        return f"[{title[1]}]({link[1]}" if title else link[0]

    def in_site(link: re.Match[str]) -> str:
        path = _path_of(link[1], page.file)
        return posixpath.relpath(_page_of(path), here) if path else link[1]

    return _LINK.sub(in_site, _NAMED.sub(titled, markdown))


def _linked(file: File) -> list[str]:
    return [path for link in _LINK.findall(file.content_string) if (path := _path_of(link, file))]


def _path_of(link: str, file: File) -> str:
    """The path in the repository of what a link on a page names; empty if there is no such file."""
    page = next((path for path, page in PAGES.items() if page == file.src_uri), f"docs/{file.src_uri}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return path if (ROOT / path).exists() else ""


def _page_of(path: str) -> str:
    """The page or picture of the site that shows a file of the repository."""
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}.md")


def _listing(path: str) -> str:
    """A file, or the files that git knows of a folder, as a page of code."""
    listed = subprocess.run(["git", "ls-files", path], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return f"# {path}\n" + "".join(_code(name) for name in listed.splitlines())


def _code(path: str) -> str:
    language = {".py": "python", ".txt": "cmake", ".c": "c"}.get(Path(path).suffix, "text")
    return f"\n## {os.path.basename(path)}\n\n````{language}\n{(ROOT / path).read_text()}````\n"
