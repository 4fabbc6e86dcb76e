"""Our HTML pages in a real browser: curves by mouse and keyboard, no sideways scrolling, nothing of a bucket is run."""

import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from protocol_fleet import Fleet, play, report

from diloco_orchestrator.cli.report_page import page
from diloco_orchestrator.clock import NoBackground
from diloco_orchestrator.inspection.report import Report
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.protocol.records import Metric

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="Debian's chromium is not installed"),
]
POLICY = re.compile('<meta http-equiv="Content-Security-Policy"[^>]*>')
NASTY = "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"


@pytest.fixture(scope="module")
def read() -> Report:
    """Of a run of three replicas and six rounds, with a loss, a held-out score and a metric with a nasty name."""
    fleet = Fleet(replicas=3, rounds=9, scored=True)
    participants = fleet.join_all()
    for round_ in range(1, 7):
        metrics = {"reward": Metric(sum=2.0 * round_, count=2), "extra.bad": Metric(sum=1.0, count=1)}
        play(participants, [1.0, 1.0, 1.0], [replace(report(i, 1.0 * round_), metrics=metrics) for i in range(3)])
    found = Report.read(RunReader(fleet.store), NoBackground())
    rows = [replace(row, extra={NASTY: 1.0 * row.round}, reason=NASTY) for row in found.status.rounds]
    return replace(found, status=replace(found.status, run_id=NASTY, reason=NASTY, rounds=rows))


def opened(html: str, folder: Path, width: int = 1000) -> str:
    """The document after the page's scripts have run, as HTML. `width`: the window's, at least 500 pixels."""
    (folder / "page.html").write_text(html)
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    profile = f"--user-data-dir={folder / 'profile'}"
    done = subprocess.run(
        [
            *browser,
            *quiet,
            profile,
            "--virtual-time-budget=3000",
            "--dump-dom",
            f"file://{folder}/page.html",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def driven(html: str, folder: Path, program: str, width: int = 1000) -> list[str]:
    """What `program` says by `say(…)`, run in the page after its own script, without the policy that forbids it."""
    driver = (
        "<script>const said = []; const say = (x) => said.push(String(x));"
        "const boxes = [...document.querySelectorAll('.plot')];"
        "const press = (box, key) => box.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));"
        "const later = () => new Promise((done) => setTimeout(done, 60));"
        f"(async () => {{ await later(); {program} document.title = said.join('|'); }})()</script></body>"
    )
    html = POLICY.sub("", html).replace("</body>", driver)
    if width < 500:  # no window of a headless chromium is as narrow as a phone
        told = html.replace("document.title = said.join('|')", "parent.postMessage(said.join('|'), '*')")
        (folder / "inner.html").write_text(told)
        html = f"<title></title><iframe src=inner.html width={width} height=900></iframe>"
        html += "<script>addEventListener('message', (told) => (document.title = told.data))</script>"
    dom = opened(html, folder, width)
    return unescape(re.findall("<title>(.*?)</title>", dom, re.DOTALL)[0]).split("|")


@pytest.mark.parametrize("width", [390, 1000, 1600])
def test_no_width_scrolls_sideways(read, width, tmp_path):
    program = "say(document.documentElement.scrollWidth); say(boxes.length);"
    program += "say(boxes[0].querySelector('canvas').width > 200);"
    scrolled, plots, drawn = driven(page(read), tmp_path, program, width)
    assert int(scrolled) <= width
    assert (int(plots), drawn) == (6, "true")


def test_arrow_keys_read_the_values_of_all_lines_aloud(read, tmp_path):
    program = "press(boxes[0], 'ArrowRight'); press(boxes[0], 'ArrowRight'); await later();"
    program += "say(document.querySelector('.said').textContent); say(boxes[1].querySelector('.u-value').textContent);"
    words, beside = driven(page(read), tmp_path, program)
    assert words == "round 2, training 2, held-out before 2"
    assert beside == "2"  # the cursor of the next plot is in the same round


def test_plus_zooms_all_plots_and_zero_shows_the_whole_range(read, tmp_path):
    program = "press(boxes[0], 'End'); press(boxes[0], '+'); await later(); press(boxes[0], '+'); await later();"
    program += "press(boxes[1], 'Home'); await later(); say(document.querySelectorAll('.said')[1].textContent);"
    program += "press(boxes[1], '0'); await later(); press(boxes[1], 'Home');"
    program += "say(document.querySelectorAll('.said')[1].textContent);"
    zoomed, whole = driven(page(read), tmp_path, program)
    assert zoomed.startswith("round 5, replica 0 5") and whole.startswith("round 1, replica 0 1")


def test_the_log_scale_is_a_button_and_a_key_and_not_there_for_what_is_not_positive(read, tmp_path):
    program = (
        "const buttons = [...document.querySelectorAll('.tools button:first-child')];"
        "press(boxes[0], 'l'); say(buttons[0].getAttribute('aria-pressed'));"
        "buttons[0].click(); say(buttons[0].getAttribute('aria-pressed'));"
        "say(document.querySelector('#guard button').disabled);"
    )
    assert driven(page(read), tmp_path, program) == ["true", "false", "true"]


def test_the_mouse_shows_values_and_drags_a_zoom(read, tmp_path):
    program = (
        "const over = boxes[0].querySelector('.u-over'), at = over.getBoundingClientRect();"
        "const mouse = (type, x) => over.dispatchEvent(new MouseEvent(type, {bubbles: true, button: 0, movementX: 9,"
        " clientX: at.left + x * at.width, clientY: at.top + 50}));"
        "mouse('mouseenter', 0.01); mouse('mousemove', 0.01); await later();"
        "say(boxes[0].querySelector('.u-value').textContent);"
        "mouse('mousedown', 0.5); mouse('mousemove', 0.99); await later();"
        "document.dispatchEvent(new MouseEvent('mouseup', {bubbles: true, button: 0,"
        " clientX: at.left + 0.99 * at.width, clientY: at.top + 50})); await later();"
        "press(boxes[0], 'Home'); say(document.querySelector('.said').textContent);"
    )
    hovered, zoomed = driven(page(read), tmp_path, program)
    assert hovered == "1" and zoomed.startswith("round 4, ")


def test_screen_readers_and_print_keep_the_drawings(read, tmp_path):
    program = (
        "const svg = document.querySelector('figure.live > svg'), style = getComputedStyle(svg);"
        "say(style.display); say(svg.getAttribute('aria-label'));"
    )
    assert driven(page(read), tmp_path, program) == ["block", "training, held-out before by round"]
    assert "@media print" in page(read)


def test_a_name_or_a_reason_of_a_bucket_is_text(read, tmp_path):
    dom = opened(page(read), tmp_path)
    assert dom.count('class="live"') == 6  # our script ran
    assert "<img" not in dom and len(re.findall("<script", dom)) == 1
    assert unescape(re.findall("<title>(.*?)</title>", dom, re.DOTALL)[0]) == f"{NASTY}: {read.status.state}"


def test_even_markup_that_was_not_escaped_is_not_executed(read, tmp_path):
    attack = NASTY.removeprefix("</script>")
    dom = opened(page(read).replace("<main>", f"<main>{attack}"), tmp_path)
    assert dom.count('class="live"') == 6
    assert re.findall("<title>(.*?)</title>", dom, re.DOTALL)[0] != "run"
    without = opened(POLICY.sub("", page(read)).replace("<main>", f"<main>{attack}"), tmp_path)
    assert re.findall("<title>(.*?)</title>", without, re.DOTALL)[0] == "run"  # it is the policy that holds it
