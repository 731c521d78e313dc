"""Length rewards: what is added to the reward of a response for its length in tokens, never in characters.

Rows of family length_shaping: loss(length, reward, target, group) -> [B], no metrics. A response is correct where
its reward is above 0. The ranges are those of what is added; where they are not [-1, 0], a penalty can outweigh a
correct answer, or length can pay.

    soft_overlong       [-1, 0]       0 up to the buffer
    lcpo_max            [-1, 0]       0 on wrong answers
    lcpo_exact, length_linear, length_quadratic     (-inf, 0]
    kimi_length         [-1/2, 1/2]   at most 0 on wrong answers
    cosine_length       any           it replaces the reward
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp

from jaxpt.objectives.row import Row, replaced
from jaxpt.objectives.shaping import soft_overlong
from jaxpt.ops.masked import at_least_float32, group_extreme, stop
from jaxpt.types import Array


def linear(length: Array, reward: Array, *, lam: float) -> Array:
    return -lam * length


def quadratic(length: Array, reward: Array, target: Array, *, lam: float) -> Array:
    return -lam * (length - target) ** 2


def absolute(length: Array, reward: Array, target: Array, *, lam: float) -> Array:
    return -lam * jnp.abs(length - target)


def lcpo_max(length: Array, reward: Array, target: Array, *, lam: float, delta: float) -> Array:
    return jnp.where(reward > 0, jnp.clip(lam * (target - length) + delta, 0.0, 1.0) - 1.0, 0.0)


def kimi(length: Array, reward: Array, group: Array, *, length_weight: float) -> Array:
    """A group whose lengths are all equal gets 0; a response of length 0 tells nothing and gets 0."""
    shortest, longest = group_extreme(length, group, length > 0)
    varies = (longest > shortest) & (length > 0)
    place = (length - jnp.where(varies, shortest, 0.0)) / jnp.where(varies, longest - shortest, 1.0)
    worth = jnp.where(reward > 0, 0.5 - place, jnp.minimum(0.5 - place, 0.0))
    return length_weight * jnp.where(varies, worth, 0.0)


def cosine(
    length: Array, reward: Array, *, max_length: float, correct_short: float, correct_long: float,
    wrong_short: float, wrong_long: float, exceeded: float,
) -> Array:
    correct = reward > 0
    short, long = jnp.where(correct, correct_short, wrong_short), jnp.where(correct, correct_long, wrong_long)
    swing = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(length / max_length, 0.0, 1.0)))
    return jnp.where(length >= max_length, exceeded, long + (short - long) * swing) - reward


def overlong(length: Array, reward: Array, *, max_length: float, buffer: float) -> Array:
    return soft_overlong(length, max_length, buffer)


def _row(
    name: str, paper: str, formula: str, added: Callable[..., Array], words: str, *,
    needs: tuple[str, ...] = (), hyper: Mapping[str, float], alone: bool = True, alias_of: str = "",
) -> Row:
    """`alone`: what a response gets does not depend on the others of the batch."""

    def prepare(batch, *, total=lambda tree: tree, **overrides) -> dict:
        return {}

    def loss(length, reward, target=None, group=None, **overrides):
        length, reward = at_least_float32(length), at_least_float32(stop(reward))
        given = {"target": stop(target), "group": group}
        return added(length, reward, *(given[what] for what in needs), **replaced(name, hyper, overrides))

    return Row(
        name=name, family="length_shaping", paper=paper, formula=f"added_i = {formula}\nL_i: tokens of the response",
        needs=needs, hyper=dict(hyper), prepare=prepare, loss=loss, additive=alone, claims=(),
        parts={"length": words}, alias_of=alias_of,
    )


LCPO = "Aggarwal & Welleck 2025, arXiv 2503.04697, section 3"
ROWS = (
    _row(
        "soft_overlong", "Yu et al. 2025, arXiv 2503.14476, eq. 13",
        "-clip((L_i - ({max_length} - {buffer})) / {buffer}, 0, 1)", overlong,
        "a penalty that grows over the last tokens of the budget",
        hyper={"max_length": 20480.0, "buffer": 4096.0},
    ),
    _row(
        "length_linear",
        "a price per token, the multiplier of a bound on the mean length (Altman 1999, Constrained Markov Decision "
        "Processes); no paper's default, 3e-4 is lcpo_exact's",
        "-{lam} L_i", linear, "a price for every token", hyper={"lam": 3e-4},
    ),
    _row(
        "length_quadratic",
        f"the square in the place of the distance of {LCPO}; no paper's: from 1 / sqrt(lam) tokens off the target on, "
        "a correct answer is worth less than a wrong one on it",
        "-{lam} (L_i - target_i)^2", quadratic, "the squared distance to a target", needs=("target",),
        hyper={"lam": 1e-6},
    ),
    _row(
        "lcpo_exact", f"{LCPO} (LCPO-Exact)", "-{lam} |L_i - target_i|", absolute, "the distance to a target",
        needs=("target",), hyper={"lam": 3e-4},
    ),
    _row(
        "length_absolute", f"{LCPO}, by the name of the formula", "-{lam} |L_i - target_i|", absolute,
        "the distance to a target", needs=("target",), hyper={"lam": 3e-4}, alias_of="lcpo_exact",
    ),
    _row(
        "lcpo_max", f"{LCPO} (LCPO-Max): a correct answer's reward of 1 is multiplied by the clip",
        "[reward_i > 0] (clip({lam} (target_i - L_i) + {delta}, 0, 1) - 1)", lcpo_max,
        "a correct answer is worth less from a target on", needs=("target",), hyper={"lam": 3e-4, "delta": 0.5},
    ),
    _row(
        "kimi_length", "Kimi Team 2025, arXiv 2501.12599, section 2.3.3 (length penalty)",
        "{length_weight} w_i, w_i = 1/2 - (L_i - min_g L) / (max_g L - min_g L), at most 0 where reward_i <= 0",
        kimi, "shorter than the others of the group", needs=("group",), hyper={"length_weight": 1.0}, alone=False,
    ),
    _row(
        "cosine_length",
        "Yeo et al. 2025, arXiv 2502.03373, section 4 (cosine reward), constants of the authors' scripts: short "
        "correct answers above long ones, long wrong ones above short ones",
        "R_i - reward_i, R_i = long + (short - long) (1 + cos(pi L_i / {max_length})) / 2\n"
        "short, long: {correct_short}, {correct_long} where reward_i > 0, else {wrong_short}, {wrong_long}; "
        "R_i = {exceeded} from L_i = {max_length} on",
        cosine, "a reward between that of a short and that of a long answer",
        hyper={
            "max_length": 14336.0, "correct_short": 2.0, "correct_long": 1.0, "wrong_short": -10.0, "wrong_long": 0.0,
            "exceeded": -10.0,
        },
    ),
)
