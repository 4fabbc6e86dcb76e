"""docs/reference/settings.md: every setting of the tree in the tree's own words, in the three tiers of `run --help`.

`python tests/package/test_settings_page.py` writes the page anew.
"""

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from diloco_orchestrator.cli.setting_options import FIRST, LAST
from diloco_orchestrator.config import RunConfig

PAGE = Path(__file__).parents[2] / "docs/reference/settings.md"
ABOVE = """# Settings

Every setting of a run, with default, unit and reason, as `diloco run --help`, `--help-settings` and `--help-experts`
have them; `make docs-settings` writes this page from the tree (`diloco_orchestrator/config`). At the command line
`outer.lr` is `--outer-lr`, in a file (`--config run.toml`) `lr` below `[outer]`, and from Python `launch(…,
outer={"lr": …})`. What was chosen is frozen in `run.json`.
"""
TIERS = ("What most runs choose", "Now and then", "Right as they are for nearly every run")


def leaves(tree: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in tree.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, (*path, name))
        else:
            yield ".".join((*path, name)), field


def written() -> str:
    tiers: list[list[str]] = [[], [], []]
    for name, field in leaves(RunConfig):
        default = "" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        words = (field.description or "").replace("|", "\\|")
        tiers[0 if name in FIRST else 2 if name in LAST else 1].append(f"| `{name}` | {default} | {words} |")
    parts = [
        f"## {title}\n\n| setting | default | |\n|---|---|---|\n" + "\n".join(rows)
        for title, rows in zip(TIERS, tiers, strict=True)
    ]
    return "\n".join([ABOVE, "\n\n".join(parts)]) + "\n"


def test_the_page_is_what_the_tree_says():
    assert PAGE.read_text() == written(), "run make docs-settings"


if __name__ == "__main__":
    PAGE.write_text(written())
