"""Runs that never were: a known law, and the habits that made Kaplan's exponent out of Chinchilla's.

A run's true loss is the Chinchilla law at its total parameters and the tokens that count, plus what its recipe
costs. What is reported is another count of parameters and FLOPs. The confounders are those of Porian et al. 2024
(arXiv 2406.19146) and Pearce & Song 2024 (arXiv 2406.12907), each in its simplest form:

    embedding counts    N_total = N + omega N^(1/3) with omega = 47491 (Pearce & Song's fit to Chinchilla's sizes)
    last-layer FLOPs    6 (N + omega N^(1/3) / 2) a token where the head is counted (half of the embeddings), 6 N else
    warm-up             W tokens at a rate that rises from 0: worth W / 2, or D^2 / (2 W) of D < W tokens
    schedule length     a cosine meant for T > D tokens ends at the share s = (1 + cos(pi D / T)) / 2 of its rate;
                        the noise of that rate costs `undecayed` s nats
    one batch for all   of B tokens: D are worth D / (1 + B / B_crit(L)), B_crit = 2e8 L^(-1/.21) (Kaplan et al.
                        2020, section 5.1; L: the loss with a small batch)
    one learning rate   rate eta for all sizes, best is eta*(N) ~ N^-slope: costs `untuned` log(eta / eta*)^2 nats

The counts, the length of the warm-up and B_crit are the papers' own; the strength of `undecayed` and `untuned` (and
that they add) is an assumption, to be read as such.
"""

from typing import NamedTuple

import numpy as np

from jaxpt.scaling.chinchilla import law

OMEGA = 47491.0


class Recipe(NamedTuple):
    embeddings: bool = True  # counted among N
    last_layer: bool = True  # its FLOPs counted
    warmup: float = 0.0  # tokens
    schedule: float | None = None  # tokens the cosine is meant for; None: those of the run
    batch: float = 0.0  # tokens
    tuned: bool = True  # a learning rate for every size
    undecayed: float = 0.05  # nats at full rate
    untuned: float = 0.02  # nats for a rate off by a factor e
    best_at: float = 1e9  # size (without embeddings) for which an untuned rate is right
    slope: float = 0.3  # eta*(N) ~ N^-slope


class Runs(NamedTuple):
    """[n] as reported, and the truth."""

    N: np.ndarray
    D: np.ndarray
    C: np.ndarray
    loss: np.ndarray  # without seed noise
    total: np.ndarray  # parameters


def total_params(N: np.ndarray) -> np.ndarray:
    """With embeddings, from those without."""
    return N + OMEGA * np.cbrt(N)


def useful_tokens(D: np.ndarray, warmup: float) -> np.ndarray:
    """What D tokens are worth when the rate rises over the first `warmup`."""
    if not warmup:
        return np.asarray(D, np.float64)
    return np.where(D > warmup, D - warmup / 2, D**2 / (2 * warmup))


def critical_batch(loss: np.ndarray) -> np.ndarray:
    """Tokens at which time and compute are traded evenly (Kaplan et al. 2020, eq. 5.3)."""
    return 2e8 * loss ** (-1 / 0.21)


def flops_per_token(N: np.ndarray, recipe: Recipe) -> np.ndarray:
    """As the recipe's author counts them, N without embeddings."""
    return 6 * (N + (OMEGA / 2 * np.cbrt(N) if recipe.last_layer else 0.0))


def losses(params: np.ndarray, N: np.ndarray, D: np.ndarray, recipe: Recipe) -> np.ndarray:
    """True loss of a run of N parameters without embeddings on D tokens."""
    total, useful = total_params(N), useful_tokens(D, recipe.warmup)
    loss = law(params, total, useful)
    if recipe.batch:
        loss = law(params, total, useful / (1 + recipe.batch / critical_batch(loss)))
    if recipe.schedule is not None:
        loss = loss + recipe.undecayed * (1 + np.cos(np.pi * np.minimum(D / recipe.schedule, 1.0))) / 2
    if not recipe.tuned:
        loss = loss + recipe.untuned * (recipe.slope * np.log(N / recipe.best_at)) ** 2
    return loss


def isoflop_runs(params: np.ndarray, recipe: Recipe, budgets: np.ndarray, sizes: np.ndarray) -> Runs:
    """Every size [s] (without embeddings) at every budget [b] of the FLOPs that the recipe counts: b s runs."""
    C, N = (x.ravel() for x in np.meshgrid(budgets, sizes, indexing="ij"))
    D = C / flops_per_token(N, recipe)
    total = total_params(N)
    return Runs(total if recipe.embeddings else N, D, C, losses(params, N, D, recipe), total)


def true_exponent(params: np.ndarray, budgets: np.ndarray) -> float:
    """a of N_total* ~ C^a over the budgets, everything counted and nothing else wrong: that of the law, moved a
    little because the FLOPs of a token are not in proportion to N_total."""
    N = np.geomspace(1e3, 1e14, 20_000)
    recipe = Recipe()
    best = [total_params(N)[np.argmin(losses(params, N, C / flops_per_token(N, recipe), recipe))] for C in budgets]
    return float(np.polyfit(np.log(budgets), np.log(best), 1)[0])


HABITS = Recipe(warmup=3000 * 2**19, schedule=250_000 * 2**19, batch=2**19, tuned=False)  # Kaplan et al., section 2.2
LADDER = {  # Porian et al.'s order: one habit after the other is dropped
    "Kaplan's recipe": HABITS._replace(embeddings=False, last_layer=False),
    "last layer counted": HABITS,
    "short warm-up": HABITS._replace(warmup=0.0),
    "schedule of the run's length": Recipe(batch=HABITS.batch, tuned=False),
    "tuned batch and rate": Recipe(),
}
