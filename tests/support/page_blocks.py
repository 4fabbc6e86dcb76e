"""The fenced blocks of a page of Markdown, found and run by sybil, so that a traceback shows the page's own lines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sybil import Document, Example, Region
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

_FENCED = FencedCodeBlockLexer(language=r"[^\n]*")


def _parsed(document: Document) -> Iterator[Region]:
    for region in _FENCED(document):
        region.parsed, region.evaluator = region.lexemes["source"], PythonEvaluator()
        yield region


def examples(page: Path, *languages: str) -> list[Example]:
    """The blocks of these languages in order; "" is the language of a block that names none. Without any: all."""
    found = Document.parse(str(page), _parsed)
    return [each for each in found if not languages or each.region.lexemes["language"] in languages]


def blocks(page: Path, *languages: str) -> list[str]:
    """The texts of `examples`, without the indentation of their fences."""
    return [str(each.parsed) for each in examples(page, *languages)]


def run(block: Example, **names: Any) -> dict[str, Any]:
    """Run a block of Python with these names, and return all names that it leaves."""
    block.namespace.update(names)
    block.evaluate()
    return block.namespace


def prose(page: Path) -> str:
    """The page without its blocks."""
    text = page.read_text()
    for each in reversed(examples(page)):
        text = text[: each.start] + text[each.end :]
    return text
