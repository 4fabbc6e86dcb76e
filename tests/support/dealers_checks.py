"""Runs seeded schedules of the model of rounds by scatter-reduce, and looks for what must not be.

python tests/support/dealers_checks.py SEEDS [-RULE ...] [WORD]      all scenarios (whose name has WORD), without RULE
python tests/support/dealers_checks.py trace SCENARIO SEED [-RULE ...]
"""

import argparse
from collections import Counter, defaultdict

from dealers_model import attempt
from dealers_world import ALL, Broken, Scenario, Unreadable, World, digest


def lies(*deeds: str) -> frozenset[str]:
    return frozenset(deeds)


SCENARIOS = {
    **{f"calm N{n}": Scenario(n, quorum=(n + 1) // 2) for n in (2, 3, 4, 5)},
    "all": Scenario(4, quorum=4, crash=0.003),
    "quorum 1": Scenario(3, quorum=1, crash=0.01),
    "late": Scenario(5, quorum=3, speeds=(1.0, 1.0, 1.0, 1.4, 1.9), rounds=8),
    "mixed paths": Scenario(4, mixed=True, crash=0.004, rounds=8),
    **{f"deaths N{n}": Scenario(n, quorum=(n + 1) // 2, crash=0.01, rounds=8) for n in (2, 3, 4, 5)},
    "slow": Scenario(4, slow=0.2, rounds=8),
    "slow and late": Scenario(4, slow=0.15, speeds=(1.0, 1.0, 1.3, 1.8), crash=0.004, rounds=8),
    "rot": Scenario(4, rot=0.1, crash=0.003),
    **{
        f"liar N{n} {' '.join(sorted(deeds))}": Scenario(
            n, quorum=(n + 1) // 2, liars=(who,), deeds=deeds, rot=rot, crash=crash, rounds=8
        )
        for n in (3, 4, 5)
        for who, deeds, rot, crash in (
            (0, lies("good"), 0.1, 0.0),
            (1, lies("bad"), 0.05, 0.003),
            (0, lies("mute"), 0.0, 0.003),
            (1, lies("sum"), 0.0, 0.003),
            (0, lies("bytes"), 0.0, 0.003),
            (n - 1, lies("rot", "grab"), 0.0, 0.0),
            (0, lies("accuse", "bad"), 0.0, 0.003),
            (1, lies("claim"), 0.0, 0.003),
            (0, lies("bad", "sum", "accuse", "claim"), 0.03, 0.003),
        )
    },
    **{
        f"pair N{n} {' '.join(sorted(deeds))}": Scenario(
            # of four, two and a death are most of those that live: then no rule helps
            n,
            quorum=(n + 1) // 2,
            liars=(0, who),
            deeds=deeds,
            rounds=12,
            crash=crash if n > 4 else 0.0,
        )
        for n, who in ((4, 1), (5, 1), (5, 2), (6, 5))
        for deeds, crash in (
            (lies("sum"), 0.0),
            (lies("sum", "bad"), 0.003),
            (lies("sum", "accuse"), 0.0),
            (lies("sum", "omit"), 0.0),
            (lies("good", "bad"), 0.003),
        )
    },
    "pair rare snapshots N5": Scenario(5, quorum=3, liars=(0, 1), deeds=lies("sum"), rounds=16, snapshot_every=99),
    "pair and late": Scenario(
        5, quorum=3, liars=(0, 1), deeds=lies("sum", "accuse"), speeds=(1.0, 1.0, 1.0, 1.7, 1.8), rounds=12
    ),
    "pair mute": Scenario(5, quorum=3, liars=(0, 1), deeds=lies("mute")),
    "pair vouches": Scenario(4, liars=(0, 1), deeds=lies("rot", "good", "grab")),
}


def check(w: World) -> None:
    """Raise `Broken` if the schedule shows what must not be."""
    sc, last = w.scenario, w.last_round()
    honest = [i for i in w.everyone if i not in sc.liars]
    for r in range(1, last + 1):
        _check_named(w, r)
    vouched = len(sc.liars) > 1 and "rot" in sc.deeds
    if any(end == "unreadable" for end in w.ended.values()):
        if vouched:
            return  # an author and one who vouches for it: a typed end, which one liar alone must not reach
        raise Broken("a commit averages what nobody can read")
    if any(w.ended.get(i) == "diverged" for i in honest):
        raise Broken("an honest replica left")
    if last < sc.rounds or any(w.ended.get(i) != "completed" for i in honest):
        raise Broken("the run does not end")
    _check_work(w, last)
    _check_bases(w, last, honest)
    _check_known(w, last, honest)
    _check_names(w, last, honest)
    if w.awaited:
        raise Broken("the averages of a replica were waited for that had not answered the round")
    if any(w.contradicted[i] > 6 for i in honest):
        raise Broken("liars make others rebuild their bases in every round")
    outvoted = 2 * len(sc.liars) < sc.replicas and not sc.speeds  # else nobody can bar them
    void = sum(bool(w.why_void(r)) for r in range(1, last + 1))  # in such a round nobody is barred
    if any(w.vain[i] > len(sc.liars) * (w.attempts[i] + 3 + void if outvoted else sc.rounds) for i in honest):
        raise Broken("a false accusation made a replica average a shard again and again")
    if not (sc.crash or sc.slow or sc.liars or sc.speeds or sc.rot) and w.stood_in:
        raise Broken("a round in which all went well waited for a deadline")


def _check_named(w: World, r: int) -> None:
    """A commit averages only what another than its author has read, and what its own words bear out."""
    commit = w.store["commit", r]
    for author in w.inputs(r):
        for k in w.everyone:
            others = w.readers[r, author, k] - {author}
            liars = {i for i in w.scenario.liars if i != author}
            if not others and commit.named != (author,) and not liars and w.scatters(w.state(r - 1)):
                raise Broken(f"round {r} averages replica {author}, whose shard {k} nobody else has read")
    dealer_lies = w.scenario.liars and "grab" not in w.scenario.deeds and len(w.scenario.liars) == 1
    if dealer_lies and not w.inputs(r) and not w.scenario.rot and commit.by not in w.scenario.liars:
        raise Broken(f"one lying dealer left round {r} without an average")
    if w.scenario.liars == () and not w.scenario.rot and not w.inputs(r):
        raise Broken(f"round {r} averages nobody")


def _check_work(w: World, last: int) -> None:
    """Every unit of work counts once, is listed as dropped, or is still owed."""
    counted = Counter(u for r in range(1, last + 1) for i in w.inputs(r) for u in w.manifests(r)[i].units)
    if counted and max(counted.values()) > 1:
        raise Broken("work counted twice")
    for i in w.everyone:
        mine = [(r, w.store["manifest", r, i]) for r in range(1, last + 1) if ("manifest", r, i) in w.store]
        made = {u for _, m in mine for u in m.fresh}
        known = set(counted) | {u for _, m in mine for u in m.dropped} | (mine[-1][1].units if mine else set())
        if made - known:
            raise Broken("work was lost unsaid")
        if i not in w.scenario.liars and len(w.scenario.liars) < 2 and any(m.dropped for _, m in mine):
            raise Broken("a healthy replica lost work that was trained from a right base")
    out = 0
    for i in w.everyone:
        if i in w.scenario.liars or w.scenario.rot or w.scenario.slow or w.scenario.speeds or w.scenario.crash:
            continue
        for r in range(1, last + 1):
            answered = i in w.store["commit", r].answered
            out += answered and bool(w.inputs(r)) and i not in w.inputs(r)
    if out and len(w.scenario.liars) == 1 and "claim" not in w.scenario.deeds:
        raise Broken("a contribution in time and in order was not averaged")


def _check_bases(w: World, last: int, honest: list[int]) -> None:
    """All honest replicas hold what the log gives: always with one liar, soon after a draw or a snapshot with two."""
    pair, row, wrong_rounds = len(w.scenario.liars) > 1, Counter[int](), Counter[int]()
    for r in range(1, last + 1):
        truth = w.truth(r)
        for i in honest:
            wrong = r in w.stepped and w.stepped[r].get(i, truth) != truth
            row[i] = row[i] + 1 if wrong else 0
            if row[i] and not pair:
                raise Broken(f"replica {i} holds a base after round {r} that the log does not give")
            wrong_rounds[i] += wrong
            if row[i] > min(w.scenario.snapshot_every + 2, 8):
                raise Broken(f"replica {i} held a base for {row[i]} rounds that the log does not give")
            if wrong_rounds[i] > 8:
                raise Broken("two liars make bases wrong again and again")
    if pair and len(honest) > 2 and any(w.stepped[last].get(i, w.truth(last)) != w.truth(last) for i in honest):
        false = sum(f"false {r} " in str(v) for r in (last, last - 1) for k, v in w.store.items() if k[0] == "reduced")
        if not false:
            raise Broken("a false base outlived the falsehoods")


def _check_known(w: World, last: int, honest: list[int]) -> None:
    """Once an honest replica has said in a round that two published a false average, nobody honest counts its base."""
    for r in range(1, last + 1):
        commit = w.store["commit", r]
        accusers = {
            key[2]
            for key in w.keys("check", r)
            if key[2] in honest and any(false and len(word[2]) == 2 for word, false in w.store[key][2])
        }
        if not accusers or w.scenario.crash:
            continue
        if commit.by in accusers and commit.claim != digest(w.truth(r - 1)):
            raise Broken(f"the commit of round {r} names a base that its writer knew to be false")
        if any(w.manifests(r)[i].claim != digest(w.truth(r - 1)) for i in set(w.inputs(r)) & set(honest)):
            raise Broken(f"round {r} averages what was trained from a base that was known to be false")


def _check_names(w: World, last: int, honest: list[int]) -> None:
    """No honest replica is barred by one liar; whoever was found out by two others is."""
    barred, one = set(w.state(last).barred), len(w.scenario.liars) == 1
    if barred & set(honest) and len(w.scenario.liars) < 2:
        raise Broken(f"honest replicas {sorted(barred & set(honest))} are barred from dealing")
    for liar in w.scenario.liars:
        known = any(
            key[0] == "check"
            and key[1] <= last - 5
            and key[2] in honest
            and any(liar in word[2] for word, false in value[2] if false)
            for key, value in w.store.items()
        )
        outvoted = 2 * len(w.scenario.liars) < w.scenario.replicas and not (w.scenario.speeds or w.scenario.crash)
        if known and outvoted and liar not in barred:
            raise Broken(f"replica {liar} lied, and deals on")
    if one and "sum" in w.scenario.deeds and not any(w.attempts[i] > 1 for i in honest):
        counting = [r for r in range(1, last + 1) if not w.why_void(r)]
        false = [r for r in counting[:-2] if _published_falsely(w, r, w.scenario.liars[0])]
        if false and not barred:
            raise Broken("a false word was without a name")


def _published_falsely(w: World, r: int, liar: int) -> bool:
    said = w.store.get(("sums", r, liar), {})
    return any(each[0] != digest(w.average(r, k, w.inputs(r))) for k, each in said.items())


def play(name: str, seed: int, rules: frozenset[str] = ALL) -> str:
    """What is broken in a schedule; empty if everything holds."""
    world = World(SCENARIOS[name], seed, rules, attempt)
    try:
        check(world.run())
    except Broken as error:
        return str(error)
    except Unreadable as error:
        return f"a commit averages what nobody can read: {error}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+")
    parsed, without = parser.parse_known_args()
    rules = ALL - {each.removeprefix("-") for each in without}
    if parsed.what[0] == "trace":
        world = World(SCENARIOS[parsed.what[1]], int(parsed.what[2]), rules, attempt)
        world.run()
        print(*world.story, sep="\n")
        print(play(parsed.what[1], int(parsed.what[2]), rules) or "holds")
        return
    word = parsed.what[1] if len(parsed.what) > 1 else ""
    for name in (each for each in SCENARIOS if word in each):
        found: dict[str, list[int]] = defaultdict(list)
        for seed in range(int(parsed.what[0])):
            if broken := play(name, seed, rules):
                found[broken].append(seed)
        for broken, seeds in sorted(found.items()):
            print(f"{name}: {broken}: {len(seeds)} schedules, {seeds[:3]}")


if __name__ == "__main__":
    main()
