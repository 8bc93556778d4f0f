"""The page of the command line: the help of every verb, as the verb itself prints it."""

from __future__ import annotations

from typing import Any

import click
from mkdocs.structure.pages import Page

from irongrad.cli.main import cli

PAGE = "reference/command_line.md"
WIDTH = 72  # characters of a code block on a page


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Add the help below the text of the page."""
    return "\n".join([markdown, *_help()]) if page.file.src_uri == PAGE else markdown


def _help() -> list[str]:
    top = click.Context(cli, info_name="irongrad", terminal_width=WIDTH, **cli.context_settings)
    sections = [_section(cli, top)]
    for name in cli.list_commands(top):
        command = cli.get_command(top, name)
        assert command is not None
        sections.append(_section(command, click.Context(command, info_name=name, parent=top)))
    return sections


def _section(command: click.Command, context: click.Context) -> str:
    return f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
