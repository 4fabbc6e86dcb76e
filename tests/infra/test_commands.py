"""What READMEs and headers in infra/, and docs/places/clouds.md, tell people to type and open is there and works."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from page_blocks import blocks

ROOT = Path(__file__).parent.parent.parent
WORDS = [
    path for path in sorted((ROOT / "infra").rglob("*")) if path.suffix in (".md", ".yaml") or path.name == "Dockerfile"
]
_SED = re.compile(r"""sed (?:'[^']*'|"[^"]*") infra/\S+\.(?:json|yaml)""")
_PLACEHOLDER = re.compile(r"\b(BUCKET|PREFIX|ACCOUNT|REGION|CLUSTER|ISSUER|WORKSPACE|ENVIRONMENT|APP)\b")
COMMANDS = sorted({found for path in WORDS for found in _SED.findall(path.read_text())})


def test_the_commands_are_found():
    told = {command.rpartition("/")[2] for command in COMMANDS}
    have = {path.name for path in (ROOT / "infra").rglob("*") if _PLACEHOLDER.search(without_comments(path))}
    also_by_the_same_command = {"coordinator.json", "inspect.json"}
    assert told == have - also_by_the_same_command


def without_comments(path: Path) -> str:
    """The placeholders of a file that has any."""
    if path.suffix not in (".json", ".yaml"):
        return ""
    return "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("command", COMMANDS)
def test_sed_fills_every_placeholder(command: str):
    environ = {"PATH": "/usr/bin:/bin", "ISSUER": "oidc.eks.eu-central-1.amazonaws.com/id/0123456789ABCDEF"}
    filled = subprocess.run(
        command, shell=True, cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    ).stdout
    body = json.loads(filled) if command.endswith(".json") else list(yaml.safe_load_all(filled))
    assert not _PLACEHOLDER.search(json.dumps(body))


@pytest.mark.parametrize("path", WORDS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_exist(path: Path):
    text = path.read_text()
    links = [path.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    named = [ROOT / name for name in re.findall(r"\binfra/[\w/.-]+\.\w+", text)]
    assert [str(each) for each in (*links, *named) if not each.exists()] == []


def test_the_index_has_every_file():
    index = (ROOT / "infra" / "README.md").read_text()
    files = [path for path in (ROOT / "infra").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    missing = [str(each.relative_to(ROOT / "infra")) for each in files if each.name not in index]
    assert missing == []


def typed_in_docs() -> list[str]:
    """The commands of Modal and Hugging Face in docs/places, one a line: installed with this project."""
    pages = sorted((ROOT / "docs/places").glob("*.md"))
    return sorted(
        {line for page in pages for line in "".join(blocks(page)).splitlines() if re.match(r"(modal|hf) ", line)}
    )


@pytest.mark.slow
@pytest.mark.parametrize("line", typed_in_docs())
def test_commands_of_the_docs_and_their_options_exist(line: str):
    words = shlex.split(line, comments=True)
    given = [word for word in words if word.startswith("--")]
    named = words[: next((at for at, word in enumerate(words) if at and not re.fullmatch(r"[a-z]+", word)), len(words))]
    if named[:2] == ["modal", "secret"]:
        named = named[:3]  # "create" takes a name
    tool = str(Path(sys.executable).parent / named[0])
    done = subprocess.run([tool, *named[1:], "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    known = set(re.findall(r"--[a-z][a-z-]*", done.stdout))
    assert [option for option in given if option not in known] == []
