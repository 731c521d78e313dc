"""Does the noise of the gradient foretell how large a batch still saves steps?

Linear regression on Gaussian inputs whose variances fall like a power, with noisy labels; each batch is drawn anew. The
expected loss, the gradient G, the Hessian H and the covariance S of one row's gradient are known in closed form, so the
noise scale B_noise = tr(H S) / (G' H G) is exact. What counts is the number of steps to a loss, with the best learning rate
at every step (known here: eq. 2.6) or the best fixed one of twelve. McCandlish et al. expect steps = S_min (1 + B_crit / B)
with B_crit near the mean of B_noise over the run.

Source: McCandlish et al. 2018 (arXiv 1812.06162), eq. 2.6-2.11.
Command: jaxpt run noise_scale
Expected: B_crit near 186, 1.55 times the mean of B_noise; the hyperbola is within 6%. The best fixed rate has a
B_crit of about 50, and with small batches takes half the steps of the rate that is best for each step, which is greedy.
All claims supported, every control refuted.
Minutes: 1.
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

BATCHES = (4, 8, 16, 40, 100, 220, 512)
RATES = 2.0 ** np.arange(-5.0, 1.0, 0.5)  # of 1 / (largest curvature + spread of one row / B)


@dataclass(frozen=True)
class Config:
    inputs: int = 24
    decay: float = 1.0  # of the inputs' variances, i^-decay
    label_noise: float = 1.0  # standard deviation
    start: float = 8.0  # excess loss
    target: float = 0.05  # excess loss
    replicas: int = 8  # runs of one seed whose losses are averaged
    steps: int = 60  # of an endless batch; a batch of B gets (1 + allowed / B) times as many
    allowed: int = 240

    def __post_init__(self):
        within(self, 1, 4096, "inputs")
        within(self, 0, 10, "decay", "label_noise")
        within(self, 1e-6, self.start, "target")
        within(self, 1, 4096, "replicas")
        within(self, 1, 1e6, "steps", "allowed")


def curvature(cfg: Config, flat: bool) -> np.ndarray:
    """[d] variances of the inputs, the Hessian's eigenvalues; 1 together."""
    h = np.arange(1.0, cfg.inputs + 1) ** (0.0 if flat else -cfg.decay)
    return h / h.sum()


def exact(away, h, label_noise):
    """(excess loss, G' H G, tr(H S)) [...] at distances away [...,n] from the minimum: for Gaussian inputs a row's gradient
    has the covariance S = H (2 excess + label_noise^2) + G G'."""
    excess, bent = away**2 @ h / 2, away**2 @ h**3
    return excess, bent, (2 * excess + label_noise**2) * jnp.sum(h**2) + bent


@dataclass(frozen=True)
class Descent:
    cfg: Config
    batch: int
    flat: bool


def make_descent(stage: Descent) -> Program:
    """SGD at all rates on the same rows, and at the rate that is best for each step. Metrics, one number for each rate:
    mean excess loss of the replicas before the step, and B_noise (both its traces averaged over replicas)."""
    cfg, B = stage.cfg, stage.batch
    h = jnp.asarray(curvature(cfg, stage.flat), jnp.float32)
    noise = 0.0 if stage.flat else cfg.label_noise
    rates = jnp.asarray(RATES / (float(h.max()) + 1 / B), jnp.float32)

    def init(key, hyper, start=None):
        away = jax.random.normal(jax.random.fold_in(key, 0), (cfg.replicas, cfg.inputs))
        away = away * jnp.sqrt(2 * cfg.start / (away**2 @ h))[:, None]
        return {"params": {"away": jnp.broadcast_to(away[None], (rates.size + 1, *away.shape))}, "key": key,
                "step": jnp.int32(0)}

    def step(state):
        key = jax.random.fold_in(state["key"], state["step"] + 1)
        x = jax.random.normal(key, (cfg.replicas, B, cfg.inputs)) * jnp.sqrt(h)[None, None]
        error = noise * jax.random.normal(jax.random.fold_in(key, 0), (cfg.replicas, B))
        away = state["params"]["away"]
        pull = jnp.einsum("rbn,krn->krb", x, away) - error[None]
        excess, bent, spread = exact(away, h, noise)
        straight = away[-1] ** 2 @ h**2  # the last rate is chosen anew at every step
        now = jnp.concatenate([jnp.broadcast_to(rates[:, None], (rates.size, cfg.replicas)),
                               (straight / (bent[-1] + spread[-1] / B))[None]])
        metrics = {"excess": jnp.mean(excess, -1), "noise": jnp.mean(spread, -1) / jnp.mean(bent, -1)}
        mean = jnp.einsum("krb,rbn->krn", pull, x) / B
        away = jnp.clip(away - now[..., None] * mean, -1e6, 1e6)  # a rate that diverges stays finite
        return {**state, "params": {"away": away}, "step": state["step"] + 1}, metrics

    return Program(init, step, {}, lambda state: state["params"])


def stages(cfg: Config, inputs) -> list[Stage]:
    out = []
    for name, batch, flat in [*((f"b{b}", b, False) for b in BATCHES), ("flat", BATCHES[-1], True)]:
        steps = round(cfg.steps * (1 + cfg.allowed / batch))
        out.append(Stage(name, make_descent, Descent(cfg, batch, flat), steps, chunk=steps, stream="rows"))
    return out


def inputs(cfg: Config) -> dict[str, np.ndarray]:
    return {"target": np.float64(cfg.target), "batch": np.array(BATCHES, float)}


def arrival(curves: Curves, name: str, rule: str = "greedy") -> tuple[np.ndarray, np.ndarray]:
    """(steps until the mean excess loss is at the target, between steps on a straight line of its logarithm; which rate)
    [seeds], for the rate chosen anew at every step or the best fixed one; NaN where the target is not reached."""
    with np.errstate(divide="ignore"):
        excess = np.log(np.asarray(curves[f"{name}/excess"], np.float64) / float(curves["inputs/target"]))
    there = excess <= 0
    at = np.argmax(there, axis=1)
    after, before = (np.take_along_axis(excess, np.maximum(at - k, 0)[:, None], 1)[:, 0] for k in (0, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        steps = np.where(there.any(1), at - np.where(at > 0, after / (after - before), 0), np.inf)
    best = np.full(len(steps), len(RATES)) if rule == "greedy" else np.argmin(steps[:, :-1], axis=1)
    steps = steps[np.arange(len(steps)), best]
    return np.where(np.isfinite(steps), steps, np.nan), best


def needed(curves: Curves, rule: str = "greedy") -> np.ndarray:
    """[seeds, batches] steps."""
    return np.stack([arrival(curves, f"b{b}", rule)[0] for b in BATCHES], axis=1)


def hyperbola(steps: np.ndarray, batches: np.ndarray = np.array(BATCHES)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(S_min, B_crit, largest |log residual|) [seeds] of steps = S_min (1 + B_crit / B), least squares of logarithms over a
    fine grid of B_crit."""
    grid = np.geomspace(0.1, 1e4, 4001)
    shape = np.log1p(grid[:, None] / batches)
    away = np.log(steps)[:, None] - shape
    level = away.mean(axis=2, keepdims=True)
    best = np.argmin(np.sum((away - level) ** 2, axis=2), axis=1)
    rows = np.arange(len(steps))
    return np.exp(level[rows, best, 0]), grid[best], np.abs(away - level)[rows, best].max(axis=1)


def along(curves: Curves, name: str, metric: str) -> list[np.ndarray]:
    """Per seed the metric at each step until the target, the rate chosen anew at every step."""
    steps, rate = arrival(curves, name)
    values = np.asarray(curves[f"{name}/{metric}"], np.float64)
    return [values[s, : max(1, math.ceil(np.nan_to_num(steps[s], nan=1.0))), rate[s]] for s in range(len(steps))]


LARGE = f"b{BATCHES[-1]}"


def mean_noise(curves: Curves) -> np.ndarray:
    """[seeds] B_noise, mean over the steps of the largest batch's run."""
    return np.array([x.mean() for x in along(curves, LARGE, "noise")])


def follows(curves: Curves) -> np.ndarray:
    return 0.2 - hyperbola(needed(curves))[2]


def follows_perfect_scaling(curves: Curves) -> np.ndarray:
    logs = np.log(needed(curves) * np.array(BATCHES))
    return 0.2 - np.abs(logs - logs.mean(axis=1, keepdims=True)).max(axis=1)


def foretold(curves: Curves, first: bool = False) -> np.ndarray:
    scale = np.array([x[0] for x in along(curves, LARGE, "noise")]) if first else mean_noise(curves)
    return math.log(3) - np.abs(np.log(hyperbola(needed(curves))[1] / scale))


def foretold_by_the_first(curves: Curves) -> np.ndarray:
    return foretold(curves, first=True)


def falls_with_a_fixed_rate(curves: Curves) -> np.ndarray:
    return np.log(hyperbola(needed(curves))[1] / hyperbola(needed(curves, "fixed"))[1])


def falls_between_halves(curves: Curves) -> np.ndarray:
    steps, batches = needed(curves), np.array(BATCHES)
    return np.log(hyperbola(steps[:, ::2], batches[::2])[1] / hyperbola(steps[:, 1::2], batches[1::2])[1])


def grows(curves: Curves, name: str = LARGE) -> np.ndarray:
    return np.array([np.log(x[-1] / x[0]) for x in along(curves, name, "noise")])


def grows_on_flat_ground(curves: Curves) -> np.ndarray:
    return grows(curves, "flat")


CLAIMS = (
    Claim(
        name="steps_follow_the_hyperbola",
        statement="steps = S_min (1 + B_crit / B) is within 20% of the steps needed at every batch size, by more than 5%.",
        estimand=follows, margin=0.05,
        control_name="steps in proportion to 1 / B", control=follows_perfect_scaling,
    ),
    Claim(
        name="noise_scale_foretells_the_critical_batch",
        statement="With the best rate at every step, B_crit is within a factor 3 of the mean of B_noise over the run, by more "
        "than 10%.",
        estimand=foretold, margin=0.1,
        control_name="B_noise at the first step", control=foretold_by_the_first,
    ),
    Claim(
        name="one_rate_for_the_run_lowers_it",
        statement="With the best fixed rate instead, B_crit is lower by more than 18%.",
        estimand=falls_with_a_fixed_rate, margin=0.2,
        control_name="one half of the batch sizes against the other", control=falls_between_halves,
    ),
    Claim(
        name="it_grows_as_the_loss_falls",
        statement="From the start to the target B_noise more than doubles.",
        estimand=grows, margin=math.log(2),
        control_name="equal curvatures without label noise", control=grows_on_flat_ground,
    ),
)


def derived(cfg: Config, curves: Curves) -> dict[str, np.ndarray]:
    """log2 of steps and of rows needed over log2 of the batch, and B_noise along the largest batch's run."""
    steps = needed(curves)
    least, critical, _ = hyperbola(steps)
    B = np.array(BATCHES, float)
    fitted = least[:, None] * (1 + critical[:, None] / B)
    at = np.broadcast_to(np.log2(B), steps.shape)
    paths = along(curves, LARGE, "noise")
    longest = max(map(len, paths))
    noise = np.stack([np.pad(np.log2(x), (0, longest - len(x)), constant_values=np.nan) for x in paths])
    return {"batch": at, "steps": np.log2(steps), "fitted": np.log2(fitted), "rows": np.log2(steps * B),
            "fixed": np.log2(needed(curves, "fixed")), "noise": noise,
            "critical": np.broadcast_to(np.log2(critical)[:, None], noise.shape)}


LINES = {"best rate at every step": "derived/steps", "S_min (1 + B_crit / B)": "derived/fitted",
         "best fixed rate": "derived/fixed"}
PANELS = (
    Panel("Steps to the target", LINES, "log2 of steps", "log2 of the batch", dict.fromkeys(LINES, "derived/batch")),
    Panel("Rows to the target", {"rows": "derived/rows"}, "log2 of rows", "log2 of the batch", {"rows": "derived/batch"}),
    Panel("Noise scale on the way", {"B_noise": "derived/noise", "B_crit": "derived/critical"}, "log2 of rows",
          f"step of batch {BATCHES[-1]}"),
)


def sections(cfg: Config, curves: Curves) -> str:
    steps = needed(curves)
    least, critical, off = hyperbola(steps)
    scale = mean_noise(curves)
    fixed, rates = needed(curves, "fixed"), [RATES[arrival(curves, f"b{b}", "fixed")[1]] for b in BATCHES]
    rows = [[str(b), f"{s.mean():.1f}", f"{b * s.mean():.0f}", f"{f.mean():.1f}", f"{np.median(r):.3g}"]
            for b, s, f, r in zip(BATCHES, steps.T, fixed.T, rates, strict=True)]
    return "\n\n".join([
        "## Steps to the target", table(["batch", "steps", "rows", "steps at the best fixed rate", "that rate"], rows),
        f"S_min = {least.mean():.1f}, B_crit = {critical.mean():.1f} (sd {critical.std(ddof=1):.1f}), largest misfit "
        f"{100 * off.mean():.0f}%; mean B_noise {scale.mean():.1f}, B_crit over it {np.mean(critical / scale):.2f}. "
        f"With the best fixed rate B_crit = {hyperbola(fixed)[1].mean():.1f}.",
    ])


EXPERIMENT = Experiment(
    tiers={
        "smoke": Tier(Config(replicas=4), seeds=8),
        "cpu": Tier(Config(), seeds=20),
        "full": Tier(Config(replicas=32), seeds=50),
    },
    stages=stages, claims=CLAIMS, panels=PANELS, inputs=inputs, sections=sections, derived=derived,
)
