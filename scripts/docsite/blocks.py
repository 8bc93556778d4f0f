"""Fenced blocks of a page: Mermaid becomes SVG when the site is built, and `sh fails` is highlighted as `sh`."""

from __future__ import annotations

import re
from itertools import count
from typing import Any

import mermaidx
from mkdocs.config.defaults import MkDocsConfig

_NUMBERS = count()
_WIDTH = re.compile(r"max-width: ([\d.]+px)")
_SECOND_WORD = re.compile(r"^(```\w+) \w+$", re.MULTILINE)  # a word for the tests that run the page


def on_config(config: MkDocsConfig) -> None:
    """Hand Mermaid blocks to `svg_of`: readers then need no script, and no network."""
    fence = {"name": "mermaid", "class": "figure", "format": svg_of}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave only the language of each block."""
    return _SECOND_WORD.sub(r"\1", markdown)


def svg_of(source: str, *_: Any, **__: Any) -> str:
    """A figure in the colours of docs/style/site.css, with an id of its own, and its width for that style."""
    svg: str = mermaidx.render(source, config={"flowchart": {"wrappingWidth": 400}}).svg()
    svg = _WIDTH.sub(r"\g<0>; --width: \1", svg.replace("my-svg", f"figure-{next(_NUMBERS)}"), count=1)
    return f'<figure class="figure">{svg}</figure>'
