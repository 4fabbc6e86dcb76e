"""Sentences of verdicts are derived from the numbers: random series are folded, and each sentence compared with them.

Scores of round r are of the model after round r - 1: `held[m]` is the score of model m. Sentences about falls and about
what the rule can see by now are compared in test_falls.py.
"""

import random
import re
from collections.abc import Iterator

import pytest

from diloco_orchestrator.guard import Evidence, SequentialGuard


def halts(seed: int) -> Iterator[tuple[list[float], list[float], str, int | None]]:
    """Held-out scores and training metrics up to the halt, its sentence and the round to go back to."""
    rng = random.Random(f"sentences {seed}")
    for _ in range(24):
        begin, sd = rng.uniform(0.3, 3.0), rng.choice([0.01, 0.03])
        climb, onset = rng.choice([0.0, 0.01, 0.05]), rng.choice([3, 4, 5, 7, 20, 40])
        fall, gain = rng.choice([0.0, 0.02, 0.3]), rng.choice([0.0, 0.02, 0.08])
        held, trained, guard, state = [], [], SequentialGuard(), None
        for t in range(90):
            since = max(t - onset, 0)
            held.append(rng.gauss(begin + climb * min(t, onset) - fall * min(since, 6), sd))
            trained.append(rng.gauss(begin + climb * min(t, onset) + gain * since, sd))
            state, verdict = guard.fold(state, Evidence(round=t + 1, heldout=held[-1], in_loop=trained[-1]))
            if verdict.fire:
                yield held, trained, verdict.reason, verdict.rollback_to
                break


NUMBER = r"(-?[\d.e+-]+?)"


@pytest.fixture(scope="module")
def found() -> list[tuple[list[float], list[float], str, int | None]]:
    return [each for seed in range(2) for each in halts(seed)]


def test_a_halt_goes_back_to_a_model_that_no_earlier_score_beats(found):
    for held, _, reason, back in found:
        assert back is not None and reason.split("Roll back to round ")[1].split(" ")[0] == str(back)
        assert back <= held.index(max(held))


def test_what_a_hacking_gap_says_is_what_the_series_say(found):
    pattern = re.compile(
        r"Hacking Gap: since round (\d+), the end of the last 8 rounds in which the held-out score surely improved, "
        rf"the training metric has gained {NUMBER} on it; {NUMBER} is no reason to halt\. What adds up since round "
        rf"(\d+) is {NUMBER}; it halts above {NUMBER}\."
    )
    gaps = [(held, trained, pattern.match(reason)) for held, trained, reason, _ in found if reason.startswith("Hack")]
    assert len(gaps) >= 3
    for held, trained, words in gaps:
        assert words
        since, zero = int(words[1]), int(words[4])
        apart = [one - other for one, other in zip(trained, held, strict=True)]
        assert float(words[2]) == pytest.approx(apart[-1] - sum(apart[since - 7 : since + 1]) / 8, rel=0.01)
        assert float(words[2]) > float(words[3]) >= 0.2 * abs(sum(held[since - 7 : since + 1]) / 8) - 1e-2
        assert float(words[5]) > float(words[6]) == 10.0 and zero < len(held)
        assert sum(held[-8:]) < max(sum(held[t : t + 8]) for t in range(len(held) - 8))  # the newest is not the best


def test_what_an_early_collapse_says_is_what_the_series_say(found):
    pattern = re.compile(
        r"early collapse: the held-out score fell after round (\d+) and has stayed down since round (\d+), by "
        rf"{NUMBER} times what scores vary by before and since \(halts above {NUMBER}\), while the training metric "
        r"(gained|did not gain)\."
    )
    falls = [(held, trained, pattern.match(reason)) for held, trained, reason, _ in found if reason.startswith("early")]
    assert len(falls) >= 4
    for held, trained, words in falls:
        assert words
        after, since = int(words[1]), int(words[2])
        assert after < since <= after + 4 and float(words[3]) > float(words[4]) - 0.05
        later = held[since:]
        assert held[after] > max(later) and len(held) <= 32
        # The group before ends at `after` or up to three rounds before it: some end gives the ratio that is said.
        ratios = []
        for end in range(max(after - 2, 1), after + 2):
            before = held[max(0, end - 4) : end]
            climbed = before[1:]
            if 3 <= end <= 4 and climbed == sorted(climbed) and climbed[0] - before[0] > climbed[-1] - climbed[0]:
                before = climbed  # without the foot of a climb
            rise = max(y - x for i, x in enumerate(later) for y in later[i:])
            width = max(max(before) - min(before), rise) or max(later) - min(later)
            ratios.append((min(before) - max(later)) / width)
        assert any(float(words[3]) == pytest.approx(ratio, abs=0.06) for ratio in ratios), (words[0], ratios)
        middle = sum(trained[since:]) / len(later) - sum(trained[: after + 1]) / (after + 1)
        assert middle > 0 if words[5] == "gained" else middle < 0.5


def test_what_a_new_low_says_is_what_the_series_say():
    pattern = re.compile(
        rf"new low: since round (\d+) the held-out score has been below every score before, by {NUMBER} times what it "
        rf"varies by since \(halts above {NUMBER}\)\."
    )
    seen, rng = 0, random.Random("new low")
    for _ in range(20):
        guard, state, held = SequentialGuard(), None, []
        before_it = rng.randrange(5, 12)
        for t in range(40):
            held.append(rng.uniform(0.2, 1.0) if t < before_it else rng.gauss(0.1, 0.005))
            state, verdict = guard.fold(state, Evidence(round=t + 1, heldout=held[-1]))
            if verdict.fire:
                words = pattern.match(verdict.reason)
                if words:
                    seen += 1
                    since, (before, later) = int(words[1]), (held[: int(words[1])], held[-10:])
                    assert max(held[since:]) < min(before) and since <= len(held) - 10
                    ratio = (min(before) - max(later)) / (max(later) - min(later))
                    assert float(words[2]) == pytest.approx(ratio, abs=0.06) and ratio > float(words[3])
                break
    assert seen >= 10
