"""How many held-out texts that leak with an edit pass a split and a replica, and how many unrelated texts are excluded.

    python benchmarks/heldout_leaks.py --docs

Texts are docstrings and functions of the standard library, chats, JSON records and sentences made from them, and
generated Chinese and Japanese. Thresholds were chosen on these. The second table has texts and edits on which nothing
was chosen: man pages, docstrings and functions of the installed packages, /usr/share/doc, messages of vim. Corpora that
a machine lacks are left out.
"""

import argparse
import ast
import gettext
import gzip
import json
import keyword
import random
import re
import sysconfig
import textwrap
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from measuring import ROOT, Results, Sample, heading, markdown, publish

from diloco_orchestrator.split.content import item_hash
from diloco_orchestrator.split.near_duplicates import find_near

_LEAKS, _HELD, _OTHERS = 200, 1_000, 1_000  # texts: that leak, held-out ones in all, unrelated ones
_THRESHOLD = 0.5  # the default of `diloco split`
_STDLIB, _PACKAGES = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
_MAN, _DOC, _VIM = Path("/usr/share/man"), Path("/usr/share/doc"), Path("/usr/share/vim")

Rng = random.Random
Edit = Callable[[str, Rng], str]


@dataclass(frozen=True)
class Leak:
    """One way in which held-out texts get into training data."""

    what: str
    texts: Callable[[], list[str]]
    edit: Edit


# -- texts ------------------------------------------------------------------------------------------------------------


def distinct(texts: Sequence[str], seed: int = 1) -> list[str]:
    """The texts in a random order, each once."""
    found = list(dict.fromkeys(texts))
    Rng(seed).shuffle(found)
    return found


@cache
def python(root: Path, files: int = 4_000) -> tuple[list[str], list[str]]:
    """Docstrings of 5 words or more, and functions of 8 to 60 lines."""
    docs, functions = [], []
    skipped = {"test", "tests", "idlelib", "lib2to3"} | ({"site-packages"} if root == _STDLIB else set())
    for path in distinct([str(each) for each in sorted(root.rglob("*.py"))])[:files]:
        if skipped & set(Path(path).parts[len(root.parts) :]):
            continue
        try:
            source = Path(path).read_text()
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                doc = ast.get_docstring(node) or ""
                docs += [doc] if len(doc.split()) >= 5 else []
                if isinstance(node, ast.FunctionDef) and 8 <= (node.end_lineno or 0) - node.lineno <= 60:
                    functions.append(textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])))
    return distinct(docs), distinct(functions)


def docstrings(root: Path = _STDLIB, least: int = 25) -> list[str]:
    return [each for each in python(root)[0] if least <= len(each.split()) <= 300]


def functions(root: Path = _STDLIB) -> list[str]:
    return python(root)[1]


def sentences(words: int, root: Path = _STDLIB) -> list[str]:
    """Sentences of so many words."""
    found = [" ".join(each.split()) for doc in python(root)[0] for each in re.split(r"(?<=[.!?])\s+", doc)]
    return distinct([each for each in found if each.count(" ") == words - 1])


def chats() -> list[str]:
    docs = docstrings(least=5)
    return [f"User: {a}\nAssistant: {b}" for a, b in zip(docs[::2], docs[1::2], strict=False) if len(a.split()) <= 30]


def records() -> list[str]:
    docs = docstrings(least=5)
    triples = enumerate(zip(docs[::3], docs[1::3], docs[2::3], strict=False))
    return [json.dumps({"title": a[:60], "question": b, "answer": c, "id": i}) for i, (a, b, c) in triples]


def generated(first: int, particles: str, count: int = 1_500, characters: int = 120) -> list[str]:
    """Texts from 3,000 words of 1 or 2 characters, by Zipf's law, with particles and commas between."""
    rng = Rng(first)
    words = ["".join(chr(first + rng.randrange(2_000)) for _ in range(rng.choice((1, 2, 2)))) for _ in range(3_000)]
    weights = [1 / (rank + 5) for rank in range(len(words))]
    between = ["", "", *particles, "，"]
    texts = [
        "".join(word + rng.choice(between) for word in rng.choices(words, weights, k=characters)) for _ in range(count)
    ]
    return [text[:characters] for text in texts]


chinese = partial(generated, 0x4E00, "的了是在")
japanese = partial(generated, 0x5C00, "はがをにで")


def paragraphs(texts: Sequence[str]) -> list[str]:
    return distinct([p.strip() for text in texts for p in re.split(r"\n\s*\n", text) if 25 <= len(p.split()) <= 250])


@cache
def man_pages(language: str = "", files: int = 1_500) -> list[str]:
    """Pages without most of their markup."""
    pages = []
    for path in distinct([str(each) for each in sorted((_MAN / language).glob("man[1-8]/*.gz"))])[:files]:
        text = gzip.decompress(Path(path).read_bytes()).decode(errors="ignore")
        text = re.sub(r"(?m)^\.(SH|SS|TH|PP|TP|P|IP|br|sp|nf|fi)\b.*$", "\n", text)
        text = re.sub(r"(?m)^['.][A-Za-z\\\"]+ ?", "", text)
        pages.append(re.sub(r"\\f.|\\-|\\&|\\[a-z(]{1,3}", " ", text))
    return pages


def unspaced_man_pages(language: str) -> list[str]:
    found = [p for page in man_pages(language) for p in re.split(r"\n\s*\n", page) if 60 <= len(p) <= 400]
    return distinct([p for p in found if sum(ord(each) > 0x2FFF for each in p) > 0.6 * len(p)])


@cache
def shared_docs() -> list[str]:
    """Files of /usr/share/doc but copyrights."""
    files = [each for each in sorted(_DOC.rglob("*")) if each.suffix in {".txt", ".md", ".rst", ""} and each.is_file()]
    files = [each for each in files if each.name != "copyright" and each.stat().st_size < 400_000]
    return [each.read_text(errors="ignore") for each in files]


def messages(language: str) -> list[str]:
    """Messages of vim of 30 characters or more."""
    for path in sorted(_VIM.glob(f"*/lang/{language}/LC_MESSAGES/vim.mo")):
        with path.open("rb") as file:
            catalogue = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        return distinct([each for each in catalogue.values() if isinstance(each, str) and 30 <= len(each) <= 400])
    return []


# -- edits ------------------------------------------------------------------------------------------------------------


def accented() -> list[str]:
    return [text.replace("e", "é") for text in docstrings()]


def upper_nfd(text: str, _: Rng) -> str:
    return unicodedata.normalize("NFD", text.upper())


def fullwidth(text: str, _: Rng) -> str:
    return "".join(chr(ord(each) + 0xFEE0) if "!" <= each <= "~" else each for each in text)


def characters_changed(text: str, rng: Rng, one_in: int) -> str:
    places = rng.sample(range(len(text)), max(1, len(text) // one_in))
    return "".join(rng.choice(text) if at in places else each for at, each in enumerate(text))


one_of_20_characters = partial(characters_changed, one_in=20)
one_character = partial(characters_changed, one_in=1_000)


def word_changed(text: str, rng: Rng) -> str:
    words = text.split()
    words[rng.choice([at for at, each in enumerate(words) if len(each) > 3] or [0])] = "elephant"
    return " ".join(words)


def renamed(text: str, rng: Rng, names: int = 3) -> str:
    found = [each for each in dict.fromkeys(re.findall(r"\b[A-Za-z_]\w+\b", text)) if not keyword.iskeyword(each)]
    for number, name in enumerate(rng.sample(found, min(names, len(found)))):
        text = re.sub(rf"\b{name}\b", f"name_{number}", text)
    return text


def with_system_prompt(text: str, rng: Rng) -> str:
    short = "You are a helpful assistant. Answer briefly and say so when you do not know."
    long = f"{short} Think step by step, explain every decision, refuse what is harmful, and write clean, tested code."
    return f"System: {rng.choice((short, long))}\n{text}"


def keys_shuffled(text: str, rng: Rng) -> str:
    record = json.loads(text)
    return json.dumps({name: record[name] for name in rng.sample(list(record), len(record))})


def inside(text: str, rng: Rng, times: int = 3) -> str:
    """The text among others of the same kind, in one of so many times its length."""
    words = " ".join(rng.choices(docstrings(), k=4 * times)).split()
    half = len(text.split()) * (times - 1) // 2
    return " ".join(words[:half]) + f"\n\n{text}\n\n" + " ".join(words[-half:])


def typos(text: str, rng: Rng) -> str:
    def swapped(word: str) -> str:
        at = rng.randrange(len(word) - 1)
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]

    return " ".join(swapped(each) if len(each) > 3 and rng.random() < 0.05 else each for each in text.split(" "))


def without_a_sentence(text: str, rng: Rng) -> str:
    found = re.split(r"(?<=[.!?:;。])\s*", text)
    found.pop(rng.randrange(len(found)))
    return " ".join(found) or text


def as_markdown(text: str, rng: Rng) -> str:
    lines = [
        re.sub(r"\b(\w{6,})\b", lambda m: rng.choice((f"**{m[1]}**", m[1])), line) for line in textwrap.wrap(text, 60)
    ]
    return "# " + "\n- ".join(lines)


def arabic_digits(text: str, _: Rng) -> str:
    return text.translate({ord("0") + number: 0x660 + number for number in range(10)})


def in_other_words(text: str, rng: Rng, share: float = 0.1) -> str:
    other = ["thing", "make", "very", "other", "given", "such"]
    return " ".join(rng.choice(other) if len(each) > 3 and rng.random() < share else each for each in text.split(" "))


def reformatted_code(text: str, _: Rng) -> str:
    return re.sub(r"(?m)^( +)", r"\1\1", re.sub(r"(?m) *#.*$", "", text)).replace("'", '"')


def as_html(text: str, _: Rng) -> str:
    return (
        "<p>"
        + text.replace("&", "&amp;").replace("<", "&lt;").replace("'", "&#39;").replace("\n\n", "</p><p>")
        + "</p>"
    )


def shuffled_sentences(text: str, rng: Rng) -> str:
    found = re.split(r"(?<=[.!?])\s+", text)
    return " ".join(rng.sample(found, len(found)))


def lookalikes(text: str, _: Rng) -> str:
    return text.translate(str.maketrans("aeocp", "\u0430\u0435\u043e\u0441\u0440"))  # Cyrillic


def hyphenated(text: str, _: Rng) -> str:
    """Lines of 50 characters, the last word of a full one cut in two, as in the text of a PDF."""
    return "\n".join(re.sub(r"(?<=.{43})(\w{3})$", r"-\n\1", line) for line in textwrap.wrap(text, 50))


def misread(text: str, rng: Rng) -> str:
    """One of ten letters that OCR confuses is another."""
    other = {"l": "1", "o": "0", "m": "rn", "e": "c", "i": "l", "s": "5"}
    return "".join(other[each] if each in other and rng.random() < 0.1 else each for each in text)


def halves_swapped(text: str, _: Rng) -> str:
    return f"{text[len(text) // 2 :]} {text[: len(text) // 2]}"


def numbers_changed(text: str, rng: Rng) -> str:
    return re.sub(r"\d+", lambda _: str(rng.randrange(10, 99)), text)


def minified(text: str, _: Rng) -> str:
    lines = re.sub(r"(?m) *#.*$", "", text).splitlines()
    return "\n".join(re.sub(r"\s*([=+\-*/(),:\[\]{}<>])\s*", r"\1", line.rstrip()) for line in lines if line.strip())


def in_a_chat(text: str, _: Rng) -> str:
    return json.dumps({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]})


def options_shuffled(text: str, rng: Rng) -> str:
    question, *options = text.split("\n")
    options = rng.sample([each[3:] for each in options], len(options))
    return "\n".join([question, *(f"{'ABCD'[at]}) {each}" for at, each in enumerate(options))])


def multiple_choice() -> list[str]:
    """A line as the question, and four more as its options."""
    lines = [each.split("\n")[0] for each in docstrings(_PACKAGES)]
    fives = [lines[at : at + 5] for at in range(0, len(lines) - 5, 5)]
    return ["\n".join([first, *(f"{'ABCD'[at]}) {each}" for at, each in enumerate(rest))]) for first, *rest in fives]


def katakana(text: str, _: Rng) -> str:
    return "".join(chr(ord(each) + 0x60) if "ぁ" <= each <= "ゖ" else each for each in text)


TUNED = [
    Leak("upper case, NFD", accented, upper_nfd),
    Leak("ligatures", docstrings, lambda text, _: text.replace("fi", "\ufb01").replace("fl", "\ufb02")),
    Leak("soft hyphens", docstrings, lambda text, _: re.sub(r"(\w{3})(?=\w{3})", "\\1\u00ad", text)),
    Leak("fullwidth letters", docstrings, fullwidth),
    Leak("Chinese, one character of 120 changed", chinese, partial(characters_changed, one_in=120)),
    Leak("Japanese, one character of 120 changed", japanese, partial(characters_changed, one_in=120)),
    Leak('"Question: " before 8 words', partial(sentences, 8), lambda text, _: f"Question: {text}"),
    Leak("one word of 18 changed", partial(sentences, 18), word_changed),
    Leak("code, three names changed", functions, renamed),
    Leak("a chat with a system prompt", chats, with_system_prompt),
    Leak("JSON, keys shuffled", records, keys_shuffled),
    Leak("inside a text of three times its length", docstrings, inside),
]


def _man() -> list[str]:
    return paragraphs(man_pages())


def _docs() -> list[str]:
    return paragraphs(shared_docs())


OTHER = [
    Leak("man pages, a typo in 1 of 20 words", _man, typos),
    Leak("man pages, no punctuation", _man, lambda text, _: re.sub(r"[^\w\s]", "", text)),
    Leak("man pages, one sentence dropped", _man, without_a_sentence),
    Leak("man pages, wrapped to 37 columns", _man, lambda text, _: "\n".join(textwrap.wrap(text, 37))),
    Leak("/usr/share/doc, made Markdown", _docs, as_markdown),
    Leak("/usr/share/doc, made HTML", _docs, as_html),
    Leak("/usr/share/doc, quoted by >", _docs, lambda text, _: re.sub("(?m)^", "> ", text)),
    Leak("/usr/share/doc, Arabic digits", _docs, arabic_digits),
    Leak("packages' docstrings, 1 of 10 words another", partial(docstrings, _PACKAGES), in_other_words),
    Leak("packages' docstrings, sentences shuffled", partial(docstrings, _PACKAGES), shuffled_sentences),
    Leak("packages' docstrings, first half", partial(docstrings, _PACKAGES), lambda text, _: text[: len(text) // 2]),
    Leak("packages' docstrings, in 30 times its length", partial(docstrings, _PACKAGES), partial(inside, times=30)),
    Leak("packages' sentences, one of 8 words changed", partial(sentences, 8, _PACKAGES), word_changed),
    Leak("packages' sentences, one of 12 words changed", partial(sentences, 12, _PACKAGES), word_changed),
    Leak("packages' code, three names changed", partial(functions, _PACKAGES), renamed),
    Leak("packages' code, six names changed", partial(functions, _PACKAGES), partial(renamed, names=6)),
    Leak("packages' code, all names changed", partial(functions, _PACKAGES), partial(renamed, names=999)),
    Leak("packages' code, comments off, indented", partial(functions, _PACKAGES), reformatted_code),
    Leak("Chinese man pages, 1 of 20 characters changed", partial(unspaced_man_pages, "zh_CN"), one_of_20_characters),
    Leak("Japanese man pages, 1 of 20 characters changed", partial(unspaced_man_pages, "ja"), one_of_20_characters),
    Leak("Chinese messages of vim, one character changed", partial(messages, "zh_CN.UTF-8"), one_character),
    Leak("Korean messages of vim, one character changed", partial(messages, "ko"), one_character),
    Leak("Chinese messages of vim (Taiwan), one character changed", partial(messages, "zh_TW.UTF-8"), one_character),
    Leak("/usr/share/doc, Cyrillic letters that look alike", _docs, lookalikes),
    Leak("/usr/share/doc, words cut at line ends", _docs, hyphenated),
    Leak("/usr/share/doc, 1 in 10 letters misread", _docs, misread),
    Leak("/usr/share/doc, 1 of 5 words another", _docs, partial(in_other_words, share=0.2)),
    Leak("/usr/share/doc, other numbers", _docs, numbers_changed),
    Leak("/usr/share/doc, halves swapped", _docs, halves_swapped),
    Leak("/usr/share/doc, middle third", _docs, lambda text, _: text[len(text) // 3 : 2 * len(text) // 3]),
    Leak("/usr/share/doc, no spaces", _docs, lambda text, _: "".join(text.split())),
    Leak("/usr/share/doc, in percent encoding", _docs, lambda text, _: quote(text)),
    Leak("packages' code, in a chat as JSON", partial(functions, _PACKAGES), in_a_chat),
    Leak("packages' code, as a diff", partial(functions, _PACKAGES), lambda text, _: re.sub("(?m)^", "+", text)),
    Leak("packages' code, minified", partial(functions, _PACKAGES), minified),
    Leak(
        "packages' code, in camel case",
        partial(functions, _PACKAGES),
        lambda text, _: re.sub(r"_([a-z])", lambda found: found[1].upper(), text),
    ),
    Leak("multiple choice, options shuffled", multiple_choice, options_shuffled),
    Leak("multiple choice, the question alone", multiple_choice, lambda text, _: text.split("\n")[0]),
    Leak("Japanese man pages, characters apart", partial(unspaced_man_pages, "ja"), lambda text, _: " ".join(text)),
    Leak("Japanese man pages, hiragana as katakana", partial(unspaced_man_pages, "ja"), katakana),
]

UNRELATED = {
    "docstrings": docstrings,
    "code": functions,
    "Chinese": chinese,
    "Japanese": japanese,
    "sentences of 8 words": partial(sentences, 8),
    "chats": chats,
    "packages' docstrings": partial(docstrings, _PACKAGES),
    "packages' code": partial(functions, _PACKAGES),
    "man pages": _man,
    "/usr/share/doc": _docs,
    "Japanese man pages": partial(unspaced_man_pages, "ja"),
    "Chinese messages of vim": partial(messages, "zh_CN.UTF-8"),
}
CROSSED = [  # held-out texts of one corpus, others of another
    ("docstrings", "man pages"),
    ("docstrings", "/usr/share/doc"),
    ("sentences of 8 words", "man pages"),
    ("sentences of 8 words", "/usr/share/doc"),
    ("chats", "man pages"),
    ("Chinese messages of vim", "Japanese man pages"),
]


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(results: Results) -> None:
    for table, leaks in (("tuned", TUNED), ("other", OTHER)):
        for leak in leaks:
            if held := leak.texts()[:_HELD]:
                results.add(table=table, **passed(leak, held))
    for name, texts in UNRELATED.items():
        found = distinct(texts(), seed=2)[: _HELD + _OTHERS]
        if found:
            results.add(table="unrelated", **excluded(name, found[::2], found[1::2]))
    for held, others in CROSSED:
        if (a := UNRELATED[held]()[:_HELD]) and (b := UNRELATED[others]()[:_OTHERS]):
            results.add(table="crossed", **excluded(f"{held} against {others}", a, b))


def passed(leak: Leak, held: Sequence[str]) -> dict[str, Any]:
    """How many of the first texts leak unnoticed: in a split, and at a replica, which compares normal forms only."""
    rng = Rng(leak.what)
    pairs = [(text, leak.edit(text, rng)) for text in held[:_LEAKS]]
    pairs = [(text, leaked) for text, leaked in pairs if leaked != text]
    hashes = {item_hash(text) for text in held}
    equal = [item_hash(leaked) in hashes for _, leaked in pairs]
    near = find_near(held, [leaked for _, leaked in pairs], _THRESHOLD)
    split = sum(not is_equal and number not in near for number, is_equal in enumerate(equal))
    return {"what": leak.what, "leaks": len(pairs), "split": split, "replica": len(pairs) - sum(equal)}


def excluded(name: str, held: Sequence[str], others: Sequence[str]) -> dict[str, Any]:
    began = time.process_time()
    near = find_near(held, others, _THRESHOLD)
    return {
        "what": name,
        "held": len(held),
        "others": len(others),
        "excluded": len(near),
        "text_ms": 1_000 * (time.process_time() - began) / (len(held) + len(others)),
    }


# -- tables -----------------------------------------------------------------------------------------------------------


def report(samples: Sequence[Sample]) -> str:
    def rate(part: int, whole: int) -> str:
        return f"{part} of {whole} ({100 * part / whole:.0f} %)"

    def leaks(table: str) -> str:
        own = [each for each in samples if each["table"] == table]
        rows = [[s["what"], rate(s["split"], s["leaks"]), rate(s["replica"], s["leaks"])] for s in own]
        return markdown(["held-out text that leaks", "passes the split", "passes a replica"], rows)

    unrelated = [each for each in samples if each["table"] in ("unrelated", "crossed")]
    rows = [
        [
            s["what"],
            f"{s['held']:,}",
            rate(s["excluded"], s["others"]),
            f"{100 * s['excluded'] / s['others'] / s['held']:.4f} %",
        ]
        for s in unrelated
    ]
    columns = ["texts", "held out", "of the others excluded", "of the pairs"]
    return (
        f"Texts and edits on which the thresholds were chosen:\n\n{leaks('tuned')}\n\nOthers:\n\n{leaks('other')}\n\n"
        "Texts without an edit, of one corpus, where some are near-duplicates already, such as two functions of one "
        "form, and of two corpora. Of the pairs: if each excluded text is near one held-out text.\n\n"
        f"{markdown(columns, rows)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="JSON lines; default runs/bench-heldout_leaks.jsonl")
    parser.add_argument("--table", action="store_true", help="measure nothing: print the newest session's tables")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/recipes/heldout.md")
    given = parser.parse_args()
    results = Results("heldout_leaks", given.results)
    if not given.table:
        results.begin([], vars(given))
        measure(results)
    session, samples = results.newest()
    text = f"{heading(session)}\n\n{report(samples)}"
    print(text)
    if given.docs:
        publish("heldout_leaks", text, None, ROOT / "docs" / "recipes" / "heldout.md")


if __name__ == "__main__":
    main()
