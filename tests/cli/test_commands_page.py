"""Commands in the docs: docs/reference/commands.md has all of them, and the parser takes each that any page shows."""

import re
import shlex
from pathlib import Path

import click
import pytest
from page_blocks import blocks

from diloco_orchestrator.cli.main import OURS, diloco

PAGE = Path(__file__).parents[2] / "docs/reference/commands.md"
DOCS = PAGE.parents[1]
ROWS = {
    name: (words, example)
    for name, words, example in re.findall(r"^\| `(\S+)` \| (.+) \| `(.+)` \|$", PAGE.read_text(), re.M)
}


def test_the_page_has_all_commands_in_order():
    assert list(ROWS) == sorted(OURS)


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_command_has_its_words_of_help_and_an_example_that_parses(name):
    words, example = ROWS[name]
    command = diloco.get_command(None, name)
    assert words == " ".join(command.help.partition("\n\n")[0].split()), "copy the help's first paragraph"
    program, called, *arguments = shlex.split(example)
    assert (program, called) == ("diloco", name)
    command.make_context(name, arguments)  # raises for an option or an argument that does not exist


def shown(page: Path) -> list[str]:
    """Commands of ours in a page's blocks, one a line, without prompt, comment and what the shell takes."""
    lines = re.sub(r"\\\n\s*", " ", "".join(blocks(page, "", "console", "sh", "bash"))).splitlines()
    found = (re.match(r"(?:\w*\$ +)?(diloco .+?)(?: [&>|].*| +#.*)?$", line.strip()) for line in lines)
    return [each[1] for each in found if each]


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_the_parser_takes_every_command_of_a_page(page):
    for line in shown(page):
        name, *arguments = shlex.split(line)[1:]
        command = diloco.get_command(None, name)
        assert command is not None, line
        try:
            command.make_context(name, arguments)
        except click.ClickException as error:
            pytest.fail(f"{line}: {error.format_message()}")
