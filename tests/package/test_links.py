"""Links of documents lead somewhere, pages that code names exist, and a newcomer finds a page within two clicks."""

import functools
import re
import subprocess
import traceback
from collections import Counter
from pathlib import Path

import pytest
from page_blocks import prose

from diloco_orchestrator.cli.read_commands import about_error
from diloco_orchestrator.errors import AllReduceTimeout, ConfigError
from diloco_orchestrator.executors.contract import Unavailable
from diloco_orchestrator.guard.heldout import CollapseStopError, TripwireStatus
from diloco_orchestrator.replica.testing.report import ReplicaUnsound

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\(([^)\s]+)\)|<(?:a href|img src)=\"([^\"]+)\"")


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows or could add: no environment, no build output, no links to other files."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for name in sorted(set(listed)) if (path := ROOT / name).is_file() and not path.is_symlink()]


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


# -- the way through ---------------------------------------------------------------------------------------------------

START = ROOT / "docs/index.md"
# What a newcomer asks, and where it is answered: page, and words that the answer has.
QUESTIONS = {
    "What do I need to try it?": ("docs/start/tutorial.md", "make venv"),
    "What changes in my training code?": ("docs/recipes/training_loop.md", "ctx.attach"),
    "How do I start from a Hugging Face checkpoint?": ("docs/recipes/pretrained.md", "from_pretrained"),
    "Which buckets can I use?": ("docs/reference/bucket.md", "s3://bucket/x"),
    "How do I run it on my cloud or cluster?": ("docs/places/modal.md", "diloco verify"),
    "How do I use eight GPUs, or several machines?": ("docs/recipes/eight_gpus.md", "--replicas 8"),
    "What does it cost?": ("docs/recipes/costs.md", "diloco plan"),
    "How do I choose H, N and the codec?": ("docs/recipes/choosing.md", "--sync-every"),
    "What happens when a machine dies?": ("docs/start/rounds.md", "rebuilds the newest base"),
    "Can I change the number of replicas, or other settings, of a run?": ("docs/recipes/changing_a_run.md", "resume"),
    "Who has to be trusted?": ("SECURITY.md", "writes to the bucket"),
    "How does it compare with torchft, prime, Flower and others?": ("docs/start/comparison.md", "torchft"),
}


def pages_of(page: Path) -> set[Path]:
    paths = {link.partition("#")[0] for link in links(page)}
    return {found for path in paths if (found := (page.parent / path).resolve()).suffix == ".md"}


@functools.cache
def clicks() -> dict[Path, int]:
    """Pages that can be reached from the start page by links, with the least number of clicks."""
    found, edge = {START: 0}, [START]
    while edge:
        page = edge.pop(0)
        for target in sorted(pages_of(page) - found.keys()):
            found[target] = found[page] + 1
            edge.append(target)
    return found


def test_twelve_first_questions_are_answered_two_clicks_from_the_start():
    asked = re.findall(r"^\d+\. \*\*(.+?)\*\*", (ROOT / "docs/start/questions.md").read_text(), re.MULTILINE)
    assert asked == list(QUESTIONS) and len(asked) == 12
    for page, answer in QUESTIONS.values():
        assert clicks()[ROOT / page] <= 2, page
        assert answer in (ROOT / page).read_text(), page


def test_every_page_of_the_docs_can_be_reached():
    lost = {page for page in tracked("docs/*.md") if page not in clicks()}
    assert not lost, sorted(map(str, lost))


def test_the_readme_is_one_screen_and_a_half():
    assert (ROOT / "README.md").stat().st_size <= 9000


def test_the_version_to_cite_is_this_one():
    from diloco_orchestrator.protocol.version import VERSION

    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()


def test_no_line_of_the_changelog_stands_twice():
    """A merge of two branches that add lines at one place may keep what one of them has moved."""
    begun = Counter(line[:60] for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("- "))
    assert not [line for line, times in begun.items() if times > 1]


def test_every_error_that_is_raised_on_purpose_has_a_section():
    from diloco_orchestrator import CollapseStopError, errors
    from diloco_orchestrator.executors import contract
    from diloco_orchestrator.replica.process.stuck import STUCK
    from diloco_orchestrator.replica.training.rank_owners import RankMissing

    classes = [each for module in (errors, contract) for each in vars(module).values() if isinstance(each, type)]
    named = {each.__name__ for each in classes if issubclass(each, Exception)}
    named |= {CollapseStopError.__name__, STUCK, RankMissing.__name__}
    page = (ROOT / "docs/reference/troubleshooting.md").read_text()
    named -= {"DilocoError", "Documented"}
    missing = named - set(re.findall(r"^### (\w+)$", page, re.MULTILINE))
    assert not missing, f"add a section to docs/reference/troubleshooting.md: {', '.join(sorted(missing))}"
    for name in named:  # `diloco explain NAME`
        words = about_error(name.lower())
        assert words.startswith(f"{name}: ") and " Do: " in words and not re.search(r"###|\]\(", words), words


def test_a_run_in_a_folder_that_is_called_like_an_error_is_a_run(tmp_path, monkeypatch):
    (tmp_path / "nosuchrun").mkdir()
    assert about_error("nosuchrun") and not about_error("runs/first")
    monkeypatch.chdir(tmp_path)
    assert not about_error("nosuchrun")


class _OfAUser(Unavailable):
    pass


@pytest.mark.parametrize(
    ("error", "section"),
    [
        (ConfigError("a"), "configerror"),
        (AllReduceTimeout("a", [1]), "allreducetimeout"),
        (_OfAUser("a", 2.0), "unavailable"),
        (CollapseStopError(TripwireStatus(True, "a", 1, 0.0, None, None)), "collapsestoperror"),
        (ReplicaUnsound("a"), "replicaunsound"),
    ],
)
def test_a_traceback_ends_with_the_section_about_its_error(error, section):
    *_, message, last = "".join(traceback.format_exception_only(error)).splitlines()
    assert message.endswith(f": {error}") and str(error) == "a"
    assert last.lower() == f"  more: diloco explain {section}, or docs/reference/troubleshooting.md#{section}"
    assert section in anchors(ROOT / "docs/reference/troubleshooting.md")


def test_every_public_name_is_on_the_page_of_the_api():
    import diloco_orchestrator

    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(set(diloco_orchestrator.__all__) - {"__version__"})
