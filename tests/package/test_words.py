"""Glossary, protocol text and docstrings use the same plain words.

`python tests/package/test_words.py [room …]` prints every sentence of our docstrings and comments that uses a banned
word, as file:line: word (suggestion): sentence.
"""

import ast
import builtins
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from page_blocks import prose
from parsed import nodes_of, tree_of

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("diloco_orchestrator", "replica", "executors")
GLOSSARY, PROTOCOL = ROOT / "docs/reference/glossary.md", ROOT / "docs/reference/protocol.md"

# Pattern -> what to write instead.
BANNED = {
    r"\bhearts?\b": "heartbeat",
    r"\b(bears?|borne|bearing)\b": "tolerate; hold",
    r"\breliv(e|es|ed|ing)\b": "resume, restore",
    r"\briddles?\b": "say it plainly",
    r"\btold\b": "reported; passed; raises",
    r"\btell(s|ing)?\b(?!.*\bapart\b)": "raises, reports, says, distinguishes",
    r"\blook(s|ed|ing)? at\b": "poll, read, check",
    r"\b(a|each|every|the|next|last|two|between|first|second) looks?\b": "poll",
    r"\bstands?\b(?! for\b|-alone| alone\b)": "exists, is",
    r"\b(standing|stood)\b": "existing, was",
    r"\bvendors?'s? (own )?word\b": "the status that the provider reports",
    r"\bcannot be meant\b|\bcan be meant\b": "invalid",
    r"\b(ride|rides|ridden|rode) out\b": "retried",
    r"\b(give|gives|gave|giving) way\b": "exits as superseded",
    r"\b(let|lets|letting) go\b": "stops tracking",
    r"\bjump(s|ed|ing)?\b": "skips to a newer snapshot",
    r"\bow(e|es|ed|ing)\b": "carry",
    r"\bseats?\b": "attempt",
    r"\b(founds|founded|founding)\b": "create",
    r"^(Of (?!(two|three|all|any|several) )|As (?!(long|soon) as ))": "begin with the subject",
}


# -- what the code holds ----------------------------------------------------------------------------------------------


@functools.cache
def python_files(under: str = "") -> tuple[Path, ...]:
    """Files of our packages, or those below a path of the repository."""
    if under:
        path = ROOT / under
        return tuple(sorted(path.rglob("*.py"))) if path.is_dir() else (path,)
    return tuple(path for package in PACKAGES for path in python_files(package))


@functools.cache
def names_in(under: str = "") -> frozenset[str]:
    """Every name that is defined below a path: modules, classes, functions, arguments, attributes, variables."""
    found: set[str] = set()
    for path in python_files(under):
        found |= {path.stem, path.parent.name}
        for node in nodes_of(path):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                    found.add(name)
                case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    found.add(name)
    return frozenset(found)


@functools.cache
def texts_in_code() -> frozenset[str]:
    """String constants of our packages that are single words: literal values, environment names, folders."""
    nodes = (node for path in python_files() for node in nodes_of(path))
    values = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return frozenset(value.strip() for value in values if re.fullmatch(r"\S+ ?", value))


@functools.cache
def classes() -> dict[str, ast.ClassDef]:
    nodes = (node for path in python_files() for node in nodes_of(path))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def members_of(name: str) -> set[str]:
    """Fields and methods of a class, those of our own base classes included."""
    node = classes()[name]
    found = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    targets = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
    found |= {target.id for target in targets if isinstance(target, ast.Name)}
    inherited = (members_of(base.id) for base in node.bases if isinstance(base, ast.Name) and base.id in classes())
    return found.union(*inherited)


def exceptions() -> set[str]:
    """Public classes that derive from one of our two base errors."""
    found = {"DilocoError", "ExecutorError"}
    while True:
        derived = {
            name
            for name, node in classes().items()
            if not name.startswith("_") and any(isinstance(b, ast.Name) and b.id in found for b in node.bases)
        }
        if derived <= found:
            return found
        found |= derived


def record_classes() -> set[str]:
    """Classes of records.py that describe objects in the bucket."""
    body = tree_of(ROOT / "diloco_orchestrator/protocol/records.py").body
    bases = {"Record", "Part"}
    described = (node for node in body if isinstance(node, ast.ClassDef))
    return bases | {n.name for n in described if any(isinstance(b, ast.Name) and b.id in bases for b in n.bases)}


@functools.cache
def sample_keys() -> tuple[str, ...]:
    """One key of every kind that `protocol.keys` builds, and the files of a snapshot."""
    from diloco_orchestrator.protocol import keys
    from diloco_orchestrator.snapshots.file_plan import index_name

    attempt = [keys.intent, keys.handle, keys.cancel, keys.exit_record, keys.log_text, keys.heartbeat, keys.waiting]
    shards = ("model-00001-of-0000K.safetensors", index_name("model"))
    beside = ("config.json", "adapter_model.safetensors", "README.md")
    files = ("model.safetensors", "outer.safetensors", keys.SNAPSHOT_RECORD, *beside, *shards)
    return (
        *(
            keys.RUN,
            keys.START,
            keys.claim(1, 1, "0" * 16),
            keys.began(1, 1),
            keys.follows(1),
            keys.start_take("0" * 16),
            keys.LINK,
            keys.KL_RECORD,
            keys.KL_REFERENCE,
            keys.begin(1),
            keys.halt(1),
            keys.scale(1, 2),
            keys.out(1, 1),
            keys.result(1),
            keys.code("0" * 64),
            keys.RETENTION,
            keys.rotation(2),
            keys.colleague("0" * 32, 1),
            keys.invitation(1, 5, "0" * 32),
            keys.revocation(1, 5, "0" * 32),
            keys.grant(1, 5, "0" * 32, 2),
            keys.window(1, 5, "0" * 32),
        ),
        *(each(1, 1) for each in attempt),
        *(
            keys.state(1, 1, 1),
            keys.buffers(1, 1, 1),
            keys.state_piece(1, 1, 1, 1),
            keys.residual(1, 1, 1, 1),
            keys.payload(1, 1, 1, 1),
            keys.payload(1, 1, 1, 1, take=2),
            keys.want(1, 1, 1, 1, 2),
            keys.contribution(1, 1),
            keys.checked(1, 1, 1),
            keys.reduced(1, 1),
            keys.reduced_shard(1, 1),
            keys.reduced_shard(1, 1, take=2),
            keys.commit(1),
            keys.unfounded(1),
        ),
        *(str(keys.SegmentKey(1, 100, kind)) for kind in ("commits", "manifests")),
        *(
            keys.snapshot(1, name, take)
            for name in files
            for take in (keys.SHARED_TAKE, keys.own_take(0), keys.own_take(None))
        ),
        keys.join_offer("dl-1-r1-a1"),
        *(keys.join_record("dl-1-r1-a1", "0" * 64, name) for name in (keys.JOIN_TAKEN, keys.JOIN_LEASE)),
        *(keys.join_record("dl-1-r1-a1", "0" * 64, name) for name in (keys.JOIN_CANCEL, keys.JOIN_END)),
        keys.join_piece("dl-1-r1-a1", 1),
    )


def is_key(path: str) -> bool:
    """Whether a path of the documents, with <placeholders>, is a key of a run's folder, or how one begins or ends."""
    parts = (re.escape(part) for part in re.split(r"<\w+>|\d{8}", path.removesuffix("…")))
    pattern = "(^|/)" + "[0-9a-f]+".join(parts) + ("" if path.endswith(("/", "…")) else "$")
    return any(re.search(pattern, key) for key in sample_keys())


# -- what the documents name ------------------------------------------------------------------------------------------

_SUFFIXES = (".py", ".md", ".json", ".txt", ".bin", ".zip", ".safetensors", "/", "/…")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def spans_of(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def known(name: str, under: str = "") -> bool:
    return name in names_in(under) or hasattr(builtins, name)


def is_setting(name: str) -> bool:
    """Whether `section.field` is a field of the configuration tree."""
    section, _, field = name.partition(".")
    annotation = {"timing": "TimingConfig", "retry": "RetryConfig", "guard": "GuardConfig", "outer": "OuterConfig"}
    return field in members_of(annotation[section]) if section in annotation else False


def complaint(span: str) -> str:
    """Why a backticked span of a document is wrong; empty if what it names exists, or if it names nothing."""
    if span.startswith("diloco "):
        from diloco_orchestrator.cli.main import diloco

        return "" if span.split()[1] in diloco.list_commands(None) else "no such command"
    if span.startswith("make "):
        targets = (ROOT / "Makefile").read_text() + (ROOT / "benchmarks/benchmarks.mk").read_text()
        return "" if f"\n{span.split()[1]}:" in targets else "no such target"
    if span.split("/")[0] in (*PACKAGES, "tests", "docs", "infra", "examples"):
        return "" if (ROOT / span).exists() else "no such file"
    if span.endswith(_SUFFIXES):
        return "" if is_key(span) or span.lstrip("`") in texts_in_code() else "no such object"
    if quoted := re.fullmatch(r'"(\w+)"', span):
        return "" if quoted[1] in texts_in_code() else "no such value"
    name = re.sub(r"(\((\w*|…)\)|=.*)$", "", span)
    if not _NAME.fullmatch(name):
        return ""  # a formula or a command line
    if name.split(".")[0] in ("timing", "retry", "guard", "outer") and "." in name:
        return "" if is_setting(name) else "no such setting"
    parts = name.split(".")
    return "" if known(parts[-1]) or parts[-1] in texts_in_code() else "no such name in our packages"


@pytest.mark.parametrize("document", [GLOSSARY, PROTOCOL], ids=lambda path: path.name)
def test_what_the_documents_name_exists(document):
    allowed = {"package.module:function", "state_dict", "run.wait", "previous"}
    wrong = [f"`{s}`: {why}" for s in spans_of(prose(document)) if s not in allowed and (why := complaint(s))]
    assert not wrong, "\n".join(wrong)


def test_the_documented_folder_is_the_one_that_keys_builds():
    fence = PROTOCOL.read_text().partition("## 2. ")[2].split("```")[1]
    documented = [re.split(r"  |, ", line)[0] for line in fence.strip().splitlines()]
    patterns = ["[0-9a-f]+".join(map(re.escape, re.split(r"<\w+>", path))) for path in documented]
    first_takes = [key for key in sample_keys() if not key.startswith("snapshots/00000001.r")]
    missing = [key for key in first_takes if not any(re.fullmatch(pattern, key) for pattern in patterns)]
    assert set(missing) <= {"snapshots/00000001/config.json"} and all(map(is_key, documented))


def test_files_of_ours_that_any_document_names_exist():
    ours = re.compile(rf"({'|'.join(PACKAGES)}|tests|docs|infra|benchmarks)/[\w./-]*")
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for span in spans_of(prose(document)):
            assert not ours.fullmatch(span) or (ROOT / span).exists(), f"{document.name}: there is no {span}"


def test_what_does_not_exist_is_found():
    assert complaint("diloco_orchestrator/protocol/nowhere.py") and complaint("rounds/<round>/committed.json")
    assert complaint("timing.pol_s") and complaint("Contributoin") and complaint("diloco comit") and complaint('"al"')
    for right in ("rounds/<round>/commit.json", "commit.json", "contributions/", "timing.poll_s", "Contribution"):
        assert not complaint(right)


def entries() -> dict[str, str]:
    """The glossary's entries by word."""
    found = re.split(r"^### (.+)$", GLOSSARY.read_text().split("\n## Public names")[0], flags=re.MULTILINE)[1:]
    texts = (re.split(r"^## ", text, flags=re.MULTILINE)[0].strip() for text in found[1::2])
    return dict(zip(found[::2], texts, strict=True))


def test_an_entry_is_one_paragraph_that_says_where_it_is_and_what_others_call_it():
    for word, text in entries().items():
        assert "\n\n" not in text, f"{word}: more than one paragraph"
        assert text.count("*Elsewhere:* ") == 1 and text.count("*Where:* ") == 1, word


_LIST = r"((?:`[^`]+`(?! (?:in|of) `)(?:, and | and |, )?)*`[^`]+`)"


def test_every_word_is_held_where_the_glossary_says():
    checked = 0
    for word, text in entries().items():
        where = " ".join(text.partition("*Where:* ")[2].split())
        for held, places in re.findall(rf"{_LIST} (?:in|of) {_LIST}(?! (?:in|of) `)", where):
            for place in spans_of(places):
                for name in spans_of(held):
                    checked += 1
                    if place in classes():
                        assert name in members_of(place), f"{word}: {place} has no {name}"
                    else:
                        assert (ROOT / place).exists() and known(name, place), f"{word}: no {name} in {place}"
    assert checked > 60


def test_every_record_error_and_public_name_is_explained():
    import diloco_orchestrator
    import executors

    explained = {span for document in (GLOSSARY, PROTOCOL) for span in spans_of(prose(document))}
    explained |= set(re.findall(r"  ([A-Z]\w+)[:,]", PROTOCOL.read_text()))  # the objects of the run's folder
    offered = {name: getattr(executors, name) for name in dir(executors) if name[0].isupper()}
    ours = {name for name, each in offered.items() if each.__module__.startswith("diloco_orchestrator.executors.")}
    public = {*diloco_orchestrator.__all__, *ours}
    missing = (record_classes() | exceptions() | public) - explained
    assert not missing, f"explain in docs/reference/glossary.md: {', '.join(sorted(missing))}"


# -- invariants -------------------------------------------------------------------------------------------------------


def test_every_invariant_that_code_and_tests_cite_is_defined():
    defined = re.findall(r"^- \*\*(I\d+)\*\* ", PROTOCOL.read_text(), flags=re.MULTILINE)
    assert defined == [f"I{number}" for number in range(1, 15)]
    cited: dict[str, str] = {}
    invariant = re.compile(r"\bI\d+\b")
    for path in (*python_files(), *python_files("tests"), *python_files("benchmarks")):
        if path == Path(__file__) or not invariant.search(text := path.read_text()):
            continue
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                cited |= dict.fromkeys(invariant.findall(token.string), f"{path}:{token.start[0]}")
    assert set(cited) - set(defined) == set(), cited
    assert len(cited) > 5


def test_the_marked_place_for_the_attempt_machine_is_there():
    """Where a generated diagram is put; whoever writes it finds both marks, in order, once."""
    parts = PROTOCOL.read_text().split("<!-- attempt machine -->")
    assert len(parts) == 2 and parts[1].count("<!-- /attempt machine -->") == 1


# -- plain words ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A sentence with a banned word."""

    path: Path
    line: int
    word: str
    instead: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.word!r} ({self.instead}): {self.sentence}"


def blocks_of(path: Path) -> Iterator[tuple[int, str]]:
    """(first line, text) of every docstring and every run of comment lines."""
    for node in nodes_of(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, "\n".join(line.strip() for line in text.split("\n"))
    block: list[str] = []
    begin, before = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (noqa|type:|--)", token.string):
            alone = not token.line[: token.start[1]].strip()
            if not (block and alone and token.start == (before[0] + 1, before[1])):
                yield begin, "\n".join(block)
                block, begin = [], token.start[0]
            block.append(token.string.lstrip("# ").split("  # ")[0])
            before = token.start
    yield begin, "\n".join(block)


def sentences_of(text: str) -> Iterator[tuple[int, str]]:
    """(line offset, sentence on one line)."""
    begin = 0
    for end in [match.end() for match in re.finditer(r"[.!?:](?=\s)|\n\s*\n|$", text)]:
        sentence = text[begin:end]
        if sentence.strip():
            yield text[: begin + len(sentence) - len(sentence.lstrip())].count("\n"), " ".join(sentence.split())
        begin = end


def findings_in(path: Path) -> list[Finding]:
    found = []
    for line, text in blocks_of(path):
        for offset, sentence in sentences_of(text):
            for pattern, instead in BANNED.items():
                if match := re.search(pattern, sentence, flags=0 if pattern.startswith("^") else re.IGNORECASE):
                    found.append(Finding(path, line + offset, match[0].strip(), instead, sentence))
    return sorted(found, key=lambda each: each.line)


def rooms() -> dict[str, list[Path]]:
    """Files by folder."""
    found: dict[str, list[Path]] = {}
    for path in python_files():
        found.setdefault(path.parent.relative_to(ROOT).as_posix(), []).append(path)
    return found


@pytest.mark.parametrize("room", sorted(rooms()))
def test_docstrings_and_comments_use_plain_words(room):
    found = [finding for path in rooms()[room] for finding in findings_in(path)]
    assert not found, "\n".join(map(str, found))


RIDDLE = re.compile(r"(What|How|Why|Who)\b")


@pytest.mark.parametrize("room", sorted(rooms()))
def test_docstrings_begin_with_a_noun_and_no_riddle(room):
    """Say "Reason why …; empty if …" or "Number of …", so that the first word is what the reader holds."""
    found = []
    for path in rooms()[room]:
        for node in nodes_of(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if RIDDLE.match(text):
                    found.append(f"{path.relative_to(ROOT)}:{node.body[0].lineno}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)


def test_the_documents_use_plain_words():
    for document in (GLOSSARY, PROTOCOL):
        for _, sentence in sentences_of(prose(document)):
            found = [match for pattern in BANNED if (match := re.search(pattern, sentence))]
            assert not found, f"{document.name}: …{sentence[max(0, found[0].start() - 60) : found[0].end() + 60]}…"


def test_a_banned_word_is_found_with_its_line(tmp_path):
    path = tmp_path / "planted.py"
    path.write_text(
        '"""A file. It is\ntold nothing."""\n\n\n'
        'def f() -> None:\n    """Of a replica.\n\n    The answer stands.\n    """\n'
        "    # first line of a comment,\n    # since the heart moved last\n"
        "    pass  # heartbeat, stand-alone, understand\n"
    )
    found = [(each.line, each.word) for each in findings_in(path)]
    assert found == [(1, "told"), (6, "Of"), (8, "stands"), (10, "heart")]


def main(wanted: list[str]) -> int:
    """Print the findings of all rooms or of those named, then their number by room."""
    counts: dict[str, int] = {}
    for room, paths in rooms().items():
        if not wanted or room in wanted:
            found = [finding for path in paths for finding in findings_in(path)]
            print(*found, sep="\n", end="\n" if found else "")
            counts[room] = len(found)
    for room, count in counts.items():
        print(f"{room}: {f'{count} findings' if count else 'clean'}")
    return 1 if any(counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
