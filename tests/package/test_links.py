"""Links between documents lead to files and headings that exist; paths to pages that code and tests name exist, too."""

import functools
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(```+).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)|<(?:a href|img src)=\"([^\"]+)\"")


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows or could add: no environment, no build output, no links to other files."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for name in sorted(set(listed)) if (path := ROOT / name).is_file() and not path.is_symlink()]


@functools.cache
def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page as GitHub and MyST make them of its headings, and those that it sets itself."""
    found: set[str] = set(re.findall(r"^\(([\w-]+)\)=$", page.read_text(), re.MULTILINE))
    for heading in re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        found.add(next(s for s in (slug, *(f"{slug}-{n}" for n in range(1, 99))) if s not in found))
    return found


def links(page: Path) -> list[str]:
    return [a or b for a, b in _LINK.findall(prose(page)) if not re.match(r"[a-z]+:", a or b)]


def broken(page: Path) -> list[str]:
    wrong = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            wrong.append(f"{link} does not exist")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            wrong.append(f"{link} is no heading there")
    return wrong


def test_every_link_of_every_document_leads_somewhere():
    pages = tracked("*.md")
    assert len(pages) > 40
    wrong = [f"{page.relative_to(ROOT)}: {each}" for page in pages for each in broken(page)]
    assert not wrong, "\n".join(wrong)


def test_every_page_that_code_names_exists():
    wrong = []
    for path in tracked("*.py", "*.pyi", "*.toml", "*.yaml", "*.mk", "Makefile"):
        for name in re.findall(r"(?<![\w/.-])docs/[\w/-]+\.md", path.read_text()):
            if not (ROOT / name).exists():
                wrong.append(f"{path.relative_to(ROOT)}: there is no {name}")
    assert not wrong, "\n".join(wrong)


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "a.md").write_text("# Some `title`, or two\n[b](b.md) [c](#some-title-or-two) [d](#none)\n")
    assert broken(tmp_path / "a.md") == ["b.md does not exist", "#none is no heading there"]
