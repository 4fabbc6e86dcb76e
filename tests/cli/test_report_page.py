"""The HTML report of a run: complete, self-contained, safe with any text."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest
from protocol_fleet import Fleet, play, report

from diloco_orchestrator.cli.html_page import document
from diloco_orchestrator.cli.report_page import page
from diloco_orchestrator.clock import NoBackground
from diloco_orchestrator.inspection.charts import Line, chart, round_ticks, short
from diloco_orchestrator.inspection.report import Report, RoundTimes, losses_by_replica
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.attempt_records import Claim, Exit, Intent
from diloco_orchestrator.protocol.record_format import Stamp
from diloco_orchestrator.protocol.records import Halt, Metric

STAMP = Stamp("test", lambda: 1000.0)
NASTY = "<script>alert('x')</script> & \"quotes\""


@pytest.fixture
def html() -> str:
    """Of a run whose second round names nobody, halted with an odd reason."""
    fleet = Fleet(replicas=2, rounds=9, guard={"max_proxy_real_gap": 0.75}, scored=True)
    for replica_id in (0, 1):
        intent = Intent(**STAMP(), replica_id=replica_id, attempt=1, leg=1, executor="local", why="start of the leg")
        fleet.store.create(keys.intent(replica_id, 1), intent.to_bytes())
    participants = fleet.join_all()
    for round_, value in enumerate([1.0, float("nan"), 1.0, 1.0]):
        if round_ == 3:
            halt = Halt(**STAMP(), leg=1, by="test", reason=NASTY)
            fleet.store.create(keys.halt(1), halt.to_bytes())
        play(participants, [1.0, value], [report(i, 0.1 * round_, in_loop=0.2 * round_) for i in (0, 1)])
    ended = Exit(**Stamp("e", lambda: 1090.0)(), replica_id=0, attempt=1, code=0, reason="the run ended", round=4)
    fleet.store.create(keys.exit_record(0, 1), ended.to_bytes())
    key = fleet.claim_key(0)
    claim = Claim.from_bytes(fleet.store.get(key), "claim")
    fleet.store.put(key, claim.model_copy(update={"at": 1000.0}).to_bytes())
    reader = RunReader(fleet.store)
    return page(Report.read(reader, NoBackground()))


class Outline(HTMLParser):
    """Collects tags, and checks that those that must be closed are, in order."""

    VOID = ("meta", "circle", "line", "polyline")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def outline(html: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Outline()
    parser.feed(html)
    assert parser.open == []
    return parser.seen


def curves_of(html: str) -> list[dict[str, Any]]:
    """What the page's script draws: the data of each figure."""
    return [json.loads(attrs["data-curves"] or "") for _, attrs in outline(html) if "data-curves" in attrs]


def test_every_part_is_there(html):
    sections = [attrs["id"] for tag, attrs in outline(html) if tag == "section"]
    assert sections == ["loss", "guard", "bytes", "seconds", "participation", "judged", "attempts", "rounds",
                        "numbers", "configuration"]  # fmt: skip


def test_nothing_is_loaded_from_elsewhere_and_no_script_but_ours_is_allowed(html):
    tags = outline(html)
    assert not {"link", "img", "iframe"} & {tag for tag, _ in tags}
    assert not [
        attrs for _, attrs in tags if {"src", "href"} & set(attrs) or any(name.startswith("on") for name in attrs)
    ]
    assert "url(" not in html and "@import" not in html
    (script,) = re.findall("<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [attrs["content"] for tag, attrs in tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}'; ")


def test_uplot_is_the_file_that_npm_has():
    """`npm pack uplot@1.6.32`: package/dist, and its licence."""
    pinned = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    page_files = files("diloco_orchestrator.cli") / "html-page"
    assert {name: hashlib.sha256((page_files / name).read_bytes()).hexdigest() for name in pinned} == pinned
    assert "The MIT License" in (page_files / "LICENSE-uPlot").read_text()


def test_a_long_run_of_many_metrics_fits_into_two_megabytes():
    read = Report.read(RunReader(fleet_of_losses(2).store), NoBackground())
    extra = {f"metric {number}": 0.123456789 * number for number in range(45)}
    rows = [
        replace(
            read.status.rounds[0], round=r + 1, loss=1.0 / (r + 1), extra=extra, judgements={0: "clipped: " + 300 * "x"}
        )
        for r in range(5_000)
    ]
    curve = [(row.round, 0.987654321 / row.round) for row in rows]
    times = RoundTimes(dict.fromkeys(range(8), curve), curve, curve)
    long = replace(read, status=replace(read.status, rounds=rows), losses=dict.fromkeys(range(8), curve), times=times)
    html = page(long)
    assert len(html.encode()) <= 2_000_000
    assert "Not drawn, by name: metric " in html
    first = curves_of(html)[0]["lines"][0]
    assert (first["x"][0], first["y"][0]) == (1, 1.0) and first["x"][-1] == 5_000  # both ends are kept
    assert "before them are in diloco status --json" in html


def test_text_from_records_is_shown_and_never_interpreted(html):
    assert NASTY not in html and NASTY not in document(NASTY, [])
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;quotes&quot;" in html


def test_curves_have_a_point_for_every_value(html):
    lines = [attrs["points"].split() for tag, attrs in outline(html) if tag == "polyline"]
    # Held-out, declines in a row, Hacking Gap, up, down, seconds of replicas 0 and 1, between commits: no loss.
    assert [len(line) for line in lines] == [4, 4, 4, 4, 4, 4, 4, 3]
    drawn = [line for figure in curves_of(html) for line in figure["lines"]]
    assert [(line["x"], len(line["y"])) for line in drawn[:-1]] == [([1, 2, 3, 4], 4)] * 7
    assert [figure["limit"] for figure in curves_of(html)] == [None, 1.0, None, None]
    assert html.count("stroke-dasharray") == 1  # the guard's threshold


def test_the_guard_section_says_what_the_rule_can_judge_by_now():
    fleet = Fleet(replicas=2, rounds=9, guard={"rule": "sequential"}, scored=True)
    participants = fleet.join_all()
    for round_ in range(3):
        play(participants, [1.0, 1.0], [report(i, 0.1 * round_) for i in (0, 1)])
    shown = page(Report.read(RunReader(fleet.store), NoBackground()))
    assert "By round 3 the guard needs 5 more rounds to know the noise of the held-out score" in shown


def test_participation_tells_who_was_averaged(html):
    assert re.findall(r"<td>(\d/\d)</td>", html) == ["3/4", "3/4"]


def test_a_replica_of_several_ranks_is_one_row_with_their_number():
    fleet = Fleet(replicas=2, rounds=9, ranks_per_replica=[8, 1], weights="uniform")
    play(fleet.join_all(), [1.0, 1.0])
    html = page(Report.read(RunReader(fleet.store), NoBackground()))
    assert re.findall(r"<th>(replica&nbsp;[^<]*)</th>", html) == ["replica&nbsp;0 (8 ranks)", "replica&nbsp;1"]


def test_attempts_tell_how_long_and_how_they_ended(html):
    rows = re.findall(
        r"<tr><td>(\d)</td><td>1</td><td>[^<]*</td><td[^>]*>start of the leg</td><td[^>]*>([^<]*)</td><td>([^<]*)", html
    )
    assert rows == [("0", "the run ended (exit code 0)", "1 min 30 s"), ("1", "running or lost", "-")]


def test_a_run_without_rounds_has_a_page_too():
    reader = RunReader(Fleet().store)
    html = page(Report.read(reader, NoBackground()))
    outline(html)
    assert "no round is committed yet" in html and "<svg" not in html


# -- the head, the axes, the curves of replicas -----------------------------------------------------------------------


def fleet_of_losses(rounds: int) -> Fleet:
    """Three replicas; replica i observes a loss of i in every round, and ten tokens."""
    fleet = Fleet(replicas=3, rounds=rounds, sync_every=7, outer={"lr": 0.5})
    participants = fleet.join_all()
    ones = [replace(report(i), metrics={"loss": Metric(sum=2.0 * i, count=2), "tokens": TEN}) for i in range(3)]
    for _ in range(rounds):
        play(participants, [1.0, 1.0, 1.0], ones)
    return fleet


TEN = Metric(sum=10.0, count=1)


def test_the_head_says_what_ran_with_which_settings_on_what_and_for_how_long():
    fleet = fleet_of_losses(2)
    read = Report.read(RunReader(fleet.store), NoBackground())
    assert {"outer.lr": "0.5", "timing.poll_s": "0.01"}.items() <= read.facts.settings.items()
    assert not {"entrypoint", "sync_every", "outer.momentum"} & read.facts.settings.keys()
    began = 1_700_000_000.0
    facts = replace(read.facts, source=f"{'c0' * 20}+changes", code_sha256="ab" * 32, began_at=began, seconds=200.0)
    facts = replace(facts, tokens_per_s=0.3, usd=1.5, unpriced=1, machines={"NVIDIA H100 (x, 2 threads)": 3})
    shown = unescape(re.sub("<[^>]+>", "|", page(replace(read, facts=facts))))
    for words in (
        f"ran||{fleet.config.entrypoint}",
        "commit c0c0c0c0c0c0 with uncommitted changes, archive abababababab, diloco-orchestrator",
        "2023-11-14 22:13 UTC, took 3 min 20 s",
        "3; 3 on NVIDIA H100 (x, 2 threads)",
        "2 of 2, 7 inner steps each",
        "outer.lr=0.5",
        "60, 0 a second",
        "$1.50 for machines; 1 attempts of unknown price not counted",
    ):
        assert words in shown, words


@pytest.mark.parametrize("rounds", [3, pytest.param(112, marks=pytest.mark.slow)], ids=["single", "segments"])
def test_each_replica_has_its_own_curve(rounds: int):
    fleet = fleet_of_losses(rounds)
    read = Report.read(RunReader(fleet.store), NoBackground())
    assert read.losses == {i: [(round_, float(i)) for round_ in range(1, rounds + 1)] for i in range(3)}
    html = page(read)
    assert [f">replica {i}</span>" in html for i in range(3)] == [True] * 3
    fleet.store.put(keys.contribution(2, 1), b"junk")
    without = losses_by_replica(RunReader(fleet.store).log, NoBackground())
    assert [round_ for round_, _ in without[1]] == [r for r in range(1, rounds + 1) if r != 2 or rounds > 100]


def test_rounds_in_which_everybody_was_averaged_have_no_row():
    html = page(Report.read(RunReader(fleet_of_losses(3).store), NoBackground()))
    assert 'id="rounds"' not in html


def test_attempts_are_bars_on_a_time_axis_by_how_they_ended(html):
    bars = [attrs for tag, attrs in outline(html) if tag == "rect"]
    assert [bar["class"] for bar in bars] == ["bar ended", "bar running"]


def test_a_dollar_curve_is_there_where_prices_are_known():
    read = Report.read(RunReader(fleet_of_losses(3).store), NoBackground())
    assert 'id="dollars"' not in page(read)
    paid = replace(read.times, usd=[(1, 0.5), (2, 1.0), (3, 1.5)])
    (line,) = next(f["lines"] for f in curves_of(page(replace(read, times=paid))) if f["what"] == "dollars by round")
    assert (line["x"], line["y"]) == ([1, 2, 3], [0.5, 1, 1.5])


def test_what_is_not_finite_is_not_drawn():
    drawn = chart(
        [Line("a", [(1, 1.0), (2, float("nan")), (3, float("inf")), (4, 2.0)]), Line("b", [(1, float("nan"))])]
    )
    (told,) = curves_of(drawn)
    assert [(line["name"], line["x"]) for line in told["lines"]] == [("a", [1, 4])]
    assert "nan" not in drawn and "inf" not in drawn


def test_a_long_curve_keeps_the_lowest_and_the_highest_of_each_stretch():
    spikes = [(x, 9.0 if x == 777 else -9.0 if x == 333 else 0.0) for x in range(1, 2001)]
    ((line,),) = [told["lines"] for told in curves_of(chart([Line("a", spikes)], points=100))]
    assert len(line["x"]) <= 100 and (max(line["y"]), min(line["y"])) == (9, -9)
    assert line["x"] == sorted(line["x"])


@pytest.mark.parametrize(
    ("first", "last", "ticks"),
    [
        (1, 1, [1]),
        (1, 5, [1, 2, 3, 4, 5]),
        (1, 8, [2, 4, 6, 8]),
        (1, 36, [10, 20, 30]),
        (90, 112, [90, 95, 100, 105, 110]),
    ],
)
def test_axes_are_marked_at_round_numbers(first, last, ticks):
    assert round_ticks(first, last) == ticks


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.0123, "0.0123"), (-3.14159, "-3.14"), (999.0, "999"), (45678.0, "45.7k"), (2.5e6, "2.5M")],
)
def test_numbers_beside_an_axis_are_short(value, text):
    assert short(value) == text
    assert all(len(short(sign * v)) <= 7 for sign in (1, -1) for v in (1.234e-9, 0.001234, 12.34, 9.9999e5, 1.2e15))
