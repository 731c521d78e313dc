"""When does an ability that seems to appear at some size only seem to, and how is that seen?

A simulation, nothing is trained. Models of 17 sizes answer a test of many items, each an answer of several tokens that
must all be right (exact match). In the smooth world the loss per token of an item falls as a power of the size, however
slowly; in the world with a transition the probability of a right token leaps within a decade of sizes. A contaminated
test has items that a model may have by heart, the likelier the larger it is. Items differ in difficulty, and every model
draws its answers anew.

Source: Schaeffer et al. 2023 (arXiv 2304.15004) for exact match as the product of tokens; Wei et al. 2022 (arXiv
2206.07682) for the observation; Carlini et al. 2022 (arXiv 2202.07646) for memory that grows with the logarithm of the
size. The exponents and the place of the transition are assumed.
Command: jaxpt run emergence
Expected: exact match is at nothing for 0.58 of the decades, right tokens for none; the small models foretell 0.40 where it
is 0.44, and 0.00 under a transition where it is 0.54; the contaminated test shows 0.41 where fresh items are below 0.05.
All claims supported, every control refuted.
Minutes: 0.2.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxpt.lab.errors import within
from jaxpt.lab.experiment import Claim, Curves, Experiment, Panel, Stage, Tier
from jaxpt.lab.markdown import table
from jaxpt.train.program import Program

SIZES = np.geomspace(1e6, 1e13, 17)
FLAT = 0.05  # of the final score: below it a score looks like none
WORLDS = ("smooth", "again", "single", "transition", "contaminated")


@dataclass(frozen=True)
class Config:
    items: int = 1000
    tokens: int = 20  # of an answer
    loss: float = 2.3  # nats per token at the smallest size
    exponent: float = 0.25
    difficulty: float = 0.3  # standard deviation of the logarithm of an item's loss
    leap_at: float = 1e10  # parameters
    steepness: float = 8.0  # of the transition, per decade of sizes
    leaked: float = 0.4  # share of items in the training data of the contaminated test
    recalled_at: float = 1e9  # size at which half of them are recalled

    def __post_init__(self):
        within(self, 10, 1e6, "items")
        within(self, 2, 1000, "tokens")
        within(self, 0.01, 10, "loss", "exponent")
        within(self, 0, 3, "difficulty")
        within(self, 1e6, 1e13, "leap_at", "recalled_at")
        within(self, 0.1, 100, "steepness")
        within(self, 0.01, 0.99, "leaked")


def make_tests(cfg: Config) -> Program:
    """A step is one set of tests. Metrics, one number for each size: WORLD_tokens and WORLD_exact, the shares of right
    tokens and of wholly right answers; in the contaminated test also fresh_exact, of the items that did not leak."""
    decades = jnp.asarray(np.log10(SIZES / SIZES[0]), jnp.float32)
    loss = cfg.loss * 10.0 ** (-cfg.exponent * decades)

    def sigmoid(slope, at):
        return jax.nn.sigmoid(slope * (decades - math.log10(at / SIZES[0])))

    def answers(key, p, tokens):
        """[sizes,items,tokens] right or wrong, each with probability p [sizes,items]."""
        return jax.random.uniform(key, (*p.shape, tokens)) < p[..., None]

    def init(key, hyper, start=None):
        return {"params": {}, "key": key, "step": jnp.int32(0)}

    def step(state):
        key, out = jax.random.fold_in(state["key"], state["step"]), {}
        for number, world in enumerate(WORLDS):
            draw = [jax.random.fold_in(key, 4 * number + k) for k in range(4)]
            hard = jnp.exp(cfg.difficulty * jax.random.normal(draw[0], (cfg.items,)))
            p = jnp.exp(-loss[:, None] * hard[None])
            if world == "transition":
                leap = 0.01 + 0.96 * sigmoid(cfg.steepness, cfg.leap_at)
                p = jnp.exp(jnp.log(leap)[:, None] * hard[None])
            right = answers(draw[1], p, 1 if world == "single" else cfg.tokens)
            if world == "contaminated":
                leaked = (jnp.arange(cfg.items) < cfg.leaked * cfg.items)[None]
                recalled = jax.random.uniform(draw[2], p.shape) < sigmoid(3.0, cfg.recalled_at)[:, None]
                exact = jnp.all(right, -1)
                out["fresh_exact"] = jnp.sum(exact & ~leaked, 1) / jnp.sum(~leaked)
                right = right | (recalled & leaked)[..., None]
            out[f"{world}_tokens"] = jnp.mean(right, (1, 2))
            out[f"{world}_exact"] = jnp.mean(jnp.all(right, -1), 1)
        return {**state, "step": state["step"] + 1}, out

    return Program(init, step, {}, lambda state: state["params"])


def inputs(cfg: Config) -> dict[str, np.ndarray]:
    return {"tokens": np.float64(cfg.tokens)}


def stages(cfg: Config, inputs) -> list[Stage]:
    return [Stage("tests", make_tests, cfg, 1)]


def score(curves: Curves, name: str) -> np.ndarray:
    """[seeds, sizes]"""
    return np.asarray(curves[f"tests/{name}"], np.float64)[:, 0]


def flat(x: np.ndarray) -> np.ndarray:
    """[seeds]: the share of the decades of sizes that pass before the score x [seeds, sizes] stays above FLAT of its last, on
    straight lines between sizes."""
    low = x < FLAT * x[:, -1:]
    last = x.shape[1] - 1 - np.argmax(low[:, ::-1], 1)
    before, after = (x[np.arange(len(x)), np.minimum(last + k, x.shape[1] - 1)] for k in (0, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        place = last + (FLAT * x[:, -1] - before) / (after - before)
    return np.where(low.any(1), place, 0) / (x.shape[1] - 1)


def seems_sudden(curves: Curves, world: str = "smooth") -> np.ndarray:
    return flat(score(curves, f"{world}_exact")) - flat(score(curves, f"{world}_tokens"))


def seems_sudden_of_one_token(curves: Curves) -> np.ndarray:
    return seems_sudden(curves, "single")


def foretold(curves: Curves, world: str) -> tuple[np.ndarray, np.ndarray]:
    """(exact match of the largest size as the small ones' tokens foretell it, as it is) [seeds]. Small: sizes before any
    whose exact match is above 1%; -log of their share of right tokens is continued as a power of the size, and the
    answer's tokens are taken as independent."""
    tokens, exact = score(curves, f"{world}_tokens"), score(curves, f"{world}_exact")
    out = []
    for share, whole in zip(tokens, exact, strict=True):
        small = slice(0, max(2, int(np.argmax(whole > 0.01))))
        line = np.polynomial.Polynomial.fit(np.log(SIZES[small]), np.log(-np.log(np.clip(share[small], 1e-4, 1 - 1e-6))), 1)
        out.append(math.exp(-float(curves["inputs/tokens"]) * math.exp(line(math.log(SIZES[-1])))))
    return np.array(out), exact[:, -1]


def small_models_tell(curves: Curves, world: str = "smooth") -> np.ndarray:
    predicted, measured = foretold(curves, world)
    return 0.2 - np.abs(predicted - measured)


def small_models_tell_of_a_transition(curves: Curves) -> np.ndarray:
    return small_models_tell(curves, "transition")


def tokens_show(curves: Curves, world: str = "transition") -> np.ndarray:
    return flat(score(curves, f"{world}_tokens")) - flat(score(curves, "smooth_tokens"))


def tokens_show_of_another_smooth(curves: Curves) -> np.ndarray:
    return tokens_show(curves, "again")


def faked(curves: Curves, world: str = "contaminated") -> np.ndarray:
    """[seeds]: the world's exact match at the largest size whose fresh items are below 5%."""
    fresh = score(curves, "fresh_exact")
    at = np.argmax(fresh >= 0.05, axis=1) - 1
    return score(curves, f"{world}_exact")[np.arange(len(at)), at]


def faked_without_leaks(curves: Curves) -> np.ndarray:
    return faked(curves, "smooth")


CLAIMS = (
    Claim(
        name="exact_match_makes_it_sudden",
        statement="In the smooth world exact match stays at nothing for more than 0.3 of the decades longer than the share of "
        "right tokens.",
        estimand=seems_sudden, margin=0.3,
        control_name="answers of one token", control=seems_sudden_of_one_token,
    ),
    Claim(
        name="small_models_foretell_it",
        statement="From sizes that answer nothing exactly, the exact match of the largest is foretold within 0.2, by more "
        "than 0.02.",
        estimand=small_models_tell, margin=0.02,
        control_name="the world with a transition", control=small_models_tell_of_a_transition,
    ),
    Claim(
        name="tokens_show_a_transition",
        statement="Under a transition the share of right tokens, too, stays at nothing, for more than 0.3 of the decades "
        "longer than in the smooth world.",
        estimand=tokens_show, margin=0.3,
        control_name="another smooth world", control=tokens_show_of_another_smooth,
    ),
    Claim(
        name="contamination_fakes_it",
        statement="Where items that did not leak are answered less than 5% of the time, the contaminated test shows more than "
        "20%.",
        estimand=faked, margin=0.2,
        control_name="the same size on a test without leaks", control=faked_without_leaks,
    ),
)


def derived(cfg: Config, curves: Curves) -> dict[str, np.ndarray]:
    names = [f"{world}_{what}" for world in WORLDS for what in ("tokens", "exact")] + ["fresh_exact"]
    out = {name: score(curves, name) for name in names}
    return out | {"size": np.broadcast_to(np.log10(SIZES), out["smooth_exact"].shape)}


def panel(title: str, series: dict[str, str]) -> Panel:
    return Panel(title, {label: f"derived/{name}" for label, name in series.items()}, "score", "log10 of parameters",
                 dict.fromkeys(series, "derived/size"))


PANELS = (
    panel("A smooth world", {"right tokens": "smooth_tokens", "exact match": "smooth_exact"}),
    panel("A transition", {"right tokens": "transition_tokens", "exact match": "transition_exact"}),
    panel("A contaminated test", {"exact match": "contaminated_exact", "its items that did not leak": "fresh_exact",
                                  "a test without leaks": "smooth_exact"}),
)


def sections(cfg: Config, curves: Curves) -> str:
    rows = []
    for world in WORLDS:
        tokens, exact = score(curves, f"{world}_tokens"), score(curves, f"{world}_exact")
        predicted, _ = foretold(curves, world) if world != "single" else (np.array([np.nan]), None)
        rows.append([world, f"{flat(tokens).mean():.2f}", f"{flat(exact).mean():.2f}", f"{exact[:, -1].mean():.3f}",
                     "" if world == "single" else f"{predicted.mean():.3f}"])
    header = ["world", "tokens flat for", "exact match flat for", "exact match, largest size", "foretold by the small"]
    return "\n\n".join(["## Worlds", table(header, rows),
                        f"Flat: the share of the decades of sizes before a score stays above {100 * FLAT:g}% of its last."])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(items=300), seeds=8),
        "cpu": Tier(Config(), seeds=20),
        "full": Tier(Config(items=5000), seeds=50),
    },
    stages=stages, claims=CLAIMS, panels=PANELS, inputs=inputs, sections=sections, derived=derived,
)
