"""How often, and how sure: exact binomial answers about failures that come and go.

The idea: each question has one function, and its name says which interval it is. Two-sided: k of n, with
what rate (`rate_interval`). One-sided: none of n, which rate is ruled out (`ruled_out`), and how many clean
runs that takes (`clean_runs_needed`). Nothing here approximates by a normal distribution.

Sources: Clopper & Pearson 1934 (exact two-sided interval); Wald 1945 (sequential test); Robbins 1970 and
Howard et al. 2021 (an interval that may be looked at after every run).
Leaves to others: running kernels and saying what a failure is (`repeats`).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
from scipy.optimize import brentq
from scipy.special import betaln
from scipy.stats import beta as beta_distribution
from scipy.stats import fisher_exact

CONFIDENCE = 0.95
# Rates that a clean series is usually asked to rule out.
USUAL_RATES = (1e-3, 1e-4)


def _check_counts(failures: int, runs: int) -> None:
    if not 0 <= failures <= runs:
        raise ValueError(f"{failures} failures of {runs} runs: failures must lie in 0..runs")


def _check_share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} is {value}; it must lie between 0 and 1")


def rate_interval(failures: int, runs: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Two-sided Clopper-Pearson interval of a failure rate: each end errs with at most (1 - confidence) / 2.

    No run at all gives (0, 1). Raises ValueError for counts that cannot be.
    """
    _check_counts(failures, runs)
    _check_share("confidence", confidence)
    tail = (1 - confidence) / 2
    low = 0.0 if failures == 0 else float(beta_distribution.ppf(tail, failures, runs - failures + 1))
    high = 1.0 if failures == runs else float(beta_distribution.ppf(1 - tail, failures + 1, runs - failures))
    return low, high


def ruled_out(clean_runs: int, confidence: float = CONFIDENCE) -> float:
    """One-sided: rates above this would have shown in so many clean runs, 1 - (1 - confidence)^(1/n)."""
    _check_counts(0, clean_runs)
    _check_share("confidence", confidence)
    return 1.0 if clean_runs == 0 else -math.expm1(math.log1p(-confidence) / clean_runs)


def clean_runs_needed(rate: float, confidence: float = CONFIDENCE) -> int:
    """One-sided: the least number of clean runs that rules out a rate of `rate` or more."""
    _check_share("rate", rate)
    _check_share("confidence", confidence)
    exact = math.log1p(-confidence) / math.log1p(-rate)
    # A series is whole; the quotient may stand a rounding above a whole number.
    whole = max(1, math.ceil(exact - 1e-9 * max(1.0, exact)))
    return whole


def chance_of_clean(rate: float, runs: int) -> float:
    """Chance that a failure of this rate does not show in so many runs: 30 runs at 1 in 9 leave 2.9 %."""
    if not 0 <= rate <= 1:
        raise ValueError(f"rate is {rate}; it must lie in 0..1")
    _check_counts(0, runs)
    return float((1 - rate) ** runs)


def chance_of_seeing(rate: float, runs: int) -> float:
    """Power: chance that a failure of this rate shows at least once in so many runs."""
    return 1 - chance_of_clean(rate, runs)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two configurations' failure counts against each other."""

    p_value: float
    """Fisher's exact test; the chance of a table as lopsided as this or more where both fail alike."""
    alternative: Literal["two-sided", "greater", "less"]
    """`greater`: A fails more often than B."""
    rate_a: float | None
    rate_b: float | None
    """Failure rates as observed; None without a run."""


def compare_rates(
    failures_a: int,
    runs_a: int,
    failures_b: int,
    runs_b: int,
    alternative: Literal["two-sided", "greater", "less"] = "two-sided",
) -> Comparison:
    """Fisher's exact test of configuration A against B. Raises ValueError for counts that cannot be."""
    _check_counts(failures_a, runs_a)
    _check_counts(failures_b, runs_b)
    table = [[failures_a, runs_a - failures_a], [failures_b, runs_b - failures_b]]
    return Comparison(
        p_value=float(fisher_exact(table, alternative=alternative).pvalue),
        alternative=alternative,
        rate_a=failures_a / runs_a if runs_a else None,
        rate_b=failures_b / runs_b if runs_b else None,
    )


class SequentialTest:
    """Wald's sequential probability ratio test: does this still fail about as often as before?

    Made for shrinking a failure of rate r: `keeps` where the rate is at least p1 = r / 2, `lost` where it is
    at most p0 = min(0.01, r / 10), each wrong with a chance of at most 0.01.
    """

    def __init__(self, p0: float, p1: float, *, alpha: float = 0.01, beta: float = 0.01) -> None:
        """alpha: chance of `keeps` although the rate is p0; beta: of `lost` although it is p1."""
        for name, value in (("p0", p0), ("p1", p1), ("alpha", alpha), ("beta", beta)):
            _check_share(name, value)
        if not p0 < p1:
            raise ValueError(f"p0 is {p0} and p1 {p1}; p0 must be the smaller rate")
        self.p0, self.p1 = p0, p1
        self._accept, self._reject = math.log((1 - beta) / alpha), math.log(beta / (1 - alpha))
        self._failed, self._clean = math.log(p1 / p0), math.log1p(-p1) - math.log1p(-p0)
        self.failures = self.runs = 0

    @classmethod
    def for_rate(cls, rate: float, *, alpha: float = 0.01, beta: float = 0.01) -> SequentialTest:
        """The test for a failure whose rate was measured."""
        _check_share("rate", rate)
        return cls(min(0.01, rate / 10), rate / 2, alpha=alpha, beta=beta)

    @property
    def log_ratio(self) -> float:
        """Log-likelihood of what was seen under p1 over that under p0."""
        return self.failures * self._failed + (self.runs - self.failures) * self._clean

    @property
    def decision(self) -> Literal["keeps", "lost", "go on"]:
        """What the runs so far say."""
        if self.log_ratio >= self._accept:
            return "keeps"
        return "lost" if self.log_ratio <= self._reject else "go on"

    def add(self, failed: bool) -> Literal["keeps", "lost", "go on"]:
        """Count one run."""
        self.runs += 1
        self.failures += failed
        return self.decision

    @property
    def clean_runs_to_reject(self) -> int:
        """Clean runs, and nothing else, after which the answer is `lost`: 98 at a rate of 1 / 9."""
        return math.ceil(self._reject / self._clean)

    def expected_runs(self, rate: float) -> float:
        """Wald's approximation of how long the test takes at a rate (it neglects overshoot at the ends)."""
        if not 0 <= rate <= 1:
            raise ValueError(f"rate is {rate}; it must lie in 0..1")
        step = rate * self._failed + (1 - rate) * self._clean
        reject = self._chance_of_lost(rate)
        if abs(step) < 1e-12:
            variance = rate * self._failed**2 + (1 - rate) * self._clean**2
            return -self._accept * self._reject / variance
        return (reject * self._reject + (1 - reject) * self._accept) / step

    def _chance_of_lost(self, rate: float) -> float:
        """Wald's operating characteristic: chance of `lost` at a rate."""
        if rate <= 0:
            return 1.0
        if rate >= 1:
            return 0.0
        power = self._power_at(rate)
        if abs(power) < 1e-9:
            return self._accept / (self._accept - self._reject)
        high, low = math.exp(power * self._accept), math.exp(power * self._reject)
        return (high - 1) / (high - low)

    def _power_at(self, rate: float) -> float:
        """The h != 0 with rate (p1/p0)^h + (1 - rate) ((1-p1)/(1-p0))^h = 1; 1 at p0, -1 at p1."""

        def excess(h: float) -> float:
            return rate * math.exp(h * self._failed) + (1 - rate) * math.exp(h * self._clean) - 1

        step = rate * self._failed + (1 - rate) * self._clean
        if abs(step) < 1e-12:
            return 0.0
        # Convex with a root at 0 where its slope is `step`: the other root lies on the far side.
        near, far = (-1e-9, -1.0) if step > 0 else (1e-9, 1.0)
        while excess(far) < 0:
            far *= 2
        return float(brentq(excess, near, far)) if excess(near) < 0 else 0.0


def anytime_interval(failures: int, runs: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Time-uniform confidence interval: it holds at all numbers of runs at once, so a screen may peek.

    The mixture martingale of a Beta(1/2, 1/2) prior: a rate p is kept while the marginal likelihood of what
    was seen, over its likelihood under p, is below 1 / (1 - confidence) (Ville's inequality). Wider than the
    fixed-n interval, as it must be.
    """
    _check_counts(failures, runs)
    _check_share("confidence", confidence)
    if runs == 0:
        return 0.0, 1.0
    clean = runs - failures
    mixture = betaln(failures + 0.5, clean + 0.5) - betaln(0.5, 0.5)

    def excess(rate: float) -> float:
        likelihood = (failures * math.log(rate) if failures else 0.0) + (
            clean * math.log1p(-rate) if clean else 0.0
        )
        return float(mixture - likelihood + math.log(1 - confidence))

    seen = failures / runs
    tiny = 1e-15
    inside = min(max(seen, tiny), 1 - 1e-12)
    low = 0.0 if failures == 0 or excess(tiny) < 0 else float(brentq(excess, tiny, inside))
    high = 1.0 if clean == 0 or excess(1 - 1e-12) < 0 else float(brentq(excess, inside, 1 - 1e-12))
    return low, high
