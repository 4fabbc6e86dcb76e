"""docs/reference/commands.md: every command in the parser's words, with an example that the parser takes."""

import re
import shlex
from pathlib import Path

import pytest

from diloco_orchestrator.cli.main import OURS, diloco

PAGE = Path(__file__).parents[2] / "docs/reference/commands.md"
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
