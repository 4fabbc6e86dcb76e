"""What no rule can beat: the chance with which the best test finds a fall of 5 sd in the first rounds, by rounds since.

    PYTHONPATH=. .venv/bin/python benchmarks/guard_bound.py

The test of Neyman and Pearson knows when the score would fall, by how much, and the true noise. It does not know level
and climb of the score, nor whether all of it is noise of AR(1) .7, of the size that hides the fall best; it takes such
noise for a fall once in 1000. A rule knows less.
"""

import numpy as np
from guard_trajectories import Array
from measuring import markdown

FALL, MISTAKES, RUNS = 5.0, 0.001, 60_000
SINCE, ONSETS = (4, 8, 12, 16), (8, 12, 20)
HIDING = (0.7, (1.0, 1.5, 2.0, 3.0))  # AR(1) noise that looks like a fall: autocorrelation, sizes
_UNKNOWN = 1e3  # sd of what is not known, in those of the noise


def found(onset: int, since: int, phi: float, climbs: bool, size: float, rng: np.random.Generator) -> float:
    """The chance that noise of AR(1) `phi` with a fall is told from noise of `size` without one."""
    rounds = np.arange(onset + since)
    curves = np.array([np.ones(len(rounds)), np.minimum(rounds, onset - 1.0)][: 1 + climbs])
    fall, unknown = -FALL * (rounds >= onset), _UNKNOWN**2 * curves.T @ curves
    hiding, true = size**2 * _correlations(len(rounds), HIDING[0]), _correlations(len(rounds), phi)

    def evidence(scores: Array) -> Array:
        apart = scores - fall
        of_noise = ((scores @ np.linalg.inv(hiding + unknown)) * scores).sum(axis=1)
        ratio: Array = of_noise - ((apart @ np.linalg.inv(true + unknown)) * apart).sum(axis=1)
        return ratio

    without = rng.standard_normal((RUNS, len(rounds))) @ np.linalg.cholesky(hiding).T
    fallen = rng.standard_normal((RUNS // 10, len(rounds))) @ np.linalg.cholesky(true).T + fall
    return float((evidence(fallen) > np.quantile(evidence(without), 1 - MISTAKES)).mean())


def _correlations(rounds: int, phi: float) -> Array:
    places = np.arange(rounds)
    found: Array = float(phi) ** np.abs(places[:, None] - places[None])
    return found


def main() -> None:
    rng, rows = np.random.default_rng(1), []
    for phi in (0.0, 0.5):
        for climbs in (False, True):
            for onset in ONSETS:
                name = f"{'climb' if climbs else 'plateau'} of {onset} rounds, {f'AR(1) {phi:g}' if phi else 'white'}"
                rows.append([name])
                for since in SINCE:
                    rows[-1].append(f"{min(found(onset, since, phi, climbs, size, rng) for size in HIDING[1]):.0%}")
    print(markdown(["before the fall", *(f"{since} rounds since" for since in SINCE)], rows))


if __name__ == "__main__":
    main()
