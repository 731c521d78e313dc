"""Everything of jaxpt.objectives that some family of the verifier can ask: {name: Wired}.

A row's loss stands in its own family, and what its prepare makes of rewards in those of advantages. What has no family
of its own stands in the nearest: a loss of steps is a loss of values, a ranking of three with one masked a comparison of
two. Laws that the unchanged function does not obey there are not asked of a changed one. Imports are made inside the
functions: they are called inside a World, whose modules they see.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple


REDUCED = {  # a row's words for its reduction -> the law that says the same
    "every token weighs the same": "token_mean", "every sequence weighs the same, whatever its length": "sequence_mean",
    "tokens of a sequence are summed": "sequence_sum", "tokens are summed, over a constant budget": "fixed_budget",
}
NAMED = {  # what a row's name and formula say
    "forward_kl": "forward_kl", "reverse_kl": "reverse_kl", "jsd": "jsd", "ppo_dual_clip": "dual_clip_negative_only",
    "kto": "mirror", "bco": "mirror",
}


class Wired(NamedTuple):
    fn: Callable
    family: str
    claims: tuple[str, ...] = ()  # what the row or the docstring states, waivers among them
    row: str = ""


def table() -> dict[str, Wired]:
    return {**kl(), **advantages(), **along_rows(), **sums(), **logits(), **of_rows()}


# --- functions


def kl() -> dict[str, Wired]:
    from jaxpt.objectives import kl
    from jaxpt.ops.masked import stop

    def pulled(gradient, value):
        return lambda logp, ref_logp: gradient(value, logp, stop(logp), ref_logp)

    def pulled_off_policy(gradient, value):
        return lambda logp, ref_logp, old_logp: gradient(value, logp, old_logp, ref_logp)

    values = {
        kl.k1: ("unbiased",), kl.k2: ("non_negative", "gradient_of_kl", "no_clamp"),
        kl.k3: ("unbiased", "non_negative", "no_clamp"), kl.absolute: ("non_negative",), kl.forward: ("non_negative",),
        kl.jensen_shannon: ("non_negative",), functools.partial(kl.alpha, alpha=0.3): ("non_negative",),
    }
    found = {f"kl.{getattr(fn, 'func', fn).__name__}": Wired(fn, "kl", claims) for fn, claims in values.items()}
    gradients = kl.k2_gradient, kl.score_gradient, kl.importance_gradient
    found |= {f"kl.{g.__name__}": Wired(pulled(g, kl.k3), "kl", ("unbiased", "gradient_of_kl")) for g in gradients}
    off_policy = ("gradient_of_kl", "gradient_of_kl_off_policy")
    return found | {f"kl.{g.__name__}, off-policy": Wired(pulled_off_policy(g, kl.k3), "kl", off_policy)
                    for g in gradients[1:]}


def advantages() -> dict[str, Wired]:
    import jax.numpy as jnp

    from jaxpt.objectives import advantages as adv
    from jaxpt.objectives.pairs import best_and_worst

    nothing = ("singleton_zero", "missing_rewards")
    centred = ("sums_to_zero", "scale_equivariance", *nothing)
    standardised = ("scale_invariance", "sums_to_zero", *nothing)
    best = ("leave_one_out_independence", "scale_equivariance", *nothing)
    length = lambda r: 1.0 + jnp.where(jnp.isfinite(r), r, 0.0) ** 2  # noqa: E731
    with_length = lambda r, g: adv.less_length_weighted(r, g, length=length(r))  # noqa: E731
    in_parts = lambda r, g: adv.standardised_parts(r, g, parts=jnp.stack([r, jnp.sign(r), r**3], 1))  # noqa: E731

    def online_pairs(rewards, group):
        chosen, rejected, exists = best_and_worst(rewards, group)
        return jnp.zeros_like(rewards).at[chosen].add(1.0 * exists).at[rejected].add(-1.0 * exists)

    fns = {
        "constant": (adv.constant, ()), "monte_carlo": (adv.monte_carlo, ("missing_rewards",)),
        "above_baseline": (lambda r, g: adv.above_baseline(r, g, baseline=0.0 * r + 0.3), ("missing_rewards",)),
        "centred": (adv.centred, centred),
        "leave_one_out": (adv.leave_one_out, ("leave_one_out_independence", *centred)),
        "standardised": (adv.standardised, standardised),
        "standardised, ddof 0": (lambda r, g: adv.standardised(r, g, ddof=0.0), standardised),
        "standardised_parts": (in_parts, nothing), "less_length_weighted": (with_length, nothing),
        "over_mean": (lambda r, g: adv.over_mean(jnp.abs(r), g), ("scale_invariance", *nothing)),
        "pass_at_k": (lambda r, g: adv.pass_at_k(r, g, k=2.0), standardised),
        "best_of_k": (lambda r, g: adv.best_of_k(r, g, k=2.0), best), "best_of_3": (lambda r, g: adv.best_of_k(r, g, k=3.0), best),
        "exponential": (lambda r, g: adv.exponential(r, g, temperature=1.0, weight_max=20.0), ()),
        "of keys": (lambda r, g: adv.standardised(r, (g, g)), standardised),
        "best_and_worst": (online_pairs, ("scale_invariance", "sums_to_zero", "singleton_zero")),
    }
    return {f"advantages.{name}": Wired(fn, "group_advantage", claims) for name, (fn, claims) in fns.items()}


def along_rows() -> dict[str, Wired]:
    import jax.numpy as jnp

    from jaxpt.objectives import bonuses, distillation, reduction, shaping, value
    from jaxpt.ops.masked import keep

    def novelty(x, mask, gamma):
        return bonuses.episodic_novelty(x[:, :, None], mask, 2)

    def counted(x, mask, gamma):
        state = jnp.floor(keep(x, mask)).astype(jnp.int32) % 4
        return bonuses.count_bonus(state, mask, bonuses.visits(state, mask, 4), 1.0)

    def first_visits(x, mask, gamma):
        return bonuses.first_visit_bonus(jnp.floor(keep(x, mask)).astype(jnp.int32), mask, 1.0)

    def traced(rewards, values, mask, gamma, lam):
        target, _ = value.v_trace(rewards, values, jnp.zeros_like(rewards), mask, gamma, lam=lam)
        return target - keep(values, mask)

    def traced_advantage(rewards, values, mask, gamma, lam):
        return value.v_trace(rewards, values, jnp.where(values > 0, 0.3, -0.4), mask, gamma, lam=lam)[1]

    def value_loss(values, old_values, returns, mask):
        return value.clipped_value_loss(values, old_values, returns, mask, totals=reduction.totals_of(mask), value_clip=0.2)

    dropped = ("masked_reward_dropped", "zero_off_mask")
    zeros = jnp.zeros_like
    returns = {
        "returns": (lambda r, m, g: value.gae(r, zeros(r), m, g, 1.0), dropped),
        "n_step, all": (lambda r, m, g: value.n_step(r, zeros(r), m, g, 99), dropped),
        "minillm_long_term": (lambda r, m, g: distillation.minillm_long_term(zeros(r), r, m), dropped),
        "potential_based": (lambda r, m, g: shaping.potential_based(r, m, g), dropped),
        "episodic_novelty": (novelty, dropped), "count_bonus": (counted, dropped),
        "first_visit_bonus": (first_visits, dropped),
    }
    gae = {
        "gae": (value.gae, dropped), "n_step, 1": (lambda r, v, m, g, lam: value.n_step(r, v, m, g, 1), dropped),
        "n_step, 2": (lambda r, v, m, g, lam: value.n_step(r, v, m, g, 2), dropped),
        "n_step, all": (lambda r, v, m, g, lam: value.n_step(r, v, m, g, 99), dropped),
        "v_trace": (traced, dropped), "v_trace, advantages": (traced_advantage, dropped),
    }
    return {
        **{f"value.{name}": Wired(fn, "returns", claims) for name, (fn, claims) in returns.items()},
        **{f"gae.{name}": Wired(fn, "gae", claims) for name, (fn, claims) in gae.items()},
        "whiten": Wired(value.whiten, "whiten", ("zero_off_mask",)),
        "whiten, eps": Wired(functools.partial(value.whiten, std_eps=1e-4), "whiten", ("zero_off_mask",)),
        "value_loss": Wired(value_loss, "value_loss", ("pessimistic", "half_square", "declared_constants")),
    }


def sums() -> dict[str, Wired]:
    from jaxpt.objectives import reduction, reward
    from jaxpt.ops.balance import balance_loss

    def reduced(fn, **given):
        return lambda x, mask: fn(x, mask, reduction.totals_of(mask), **given)

    def prompt_mean(x, mask, *, group=None):
        tokens = reduction.prompt_tokens_of(mask, group)
        return reduction.prompt_mean(x, mask, reduction.totals_of(mask, tokens), tokens)

    alone = ("empty_rows_not_counted",)
    fns = {
        "token_mean": (reduced(reduction.token_mean), ("token_mean", *alone)),
        "sequence_mean": (reduced(reduction.sequence_mean), ("sequence_mean", *alone)),
        "sequence_sum": (reduced(reduction.sequence_sum), ("fixed_budget", *alone)),
        "budget_mean": (reduced(reduction.budget_mean, max_length=8.0), ("fixed_budget", *alone)),
        "token_sum": (reduced(reduction.token_sum), ("fixed_budget", *alone)), "prompt_mean": (prompt_mean, alone),
    }
    of_steps = {fn.__name__: fn for fn in (reward.product_of_steps, reward.weakest_step, reward.last_step)}
    return {
        **{f"reduction.{name}": Wired(fn, "aggregate", claims) for name, (fn, claims) in fns.items()},
        **{f"reward.{name}": Wired(lambda x, mask, fn=fn: fn(x, mask).sum(), "aggregate") for name, fn in of_steps.items()},
        "balance_loss": Wired(balance_loss, "router_balance", ("one_at_balance", "probabilities_alone")),
    }


def logits() -> dict[str, Wired]:
    import jax.numpy as jnp

    from jaxpt.ops.logprobs import token_stats

    def logprobs(logits, tokens, temperature=1.0):
        eye = jnp.eye(logits.shape[-1], dtype=logits.dtype)
        return token_stats(logits, eye, tokens, temperature=temperature)["logp"][:, 1:]

    return {"token_stats": Wired(logprobs, "logprobs", ("temperature",))}


# --- rows


def of_rows() -> dict[str, Wired]:
    from jaxpt.objectives import ROWS
    from jaxpt.verify import rows
    from jaxpt.verify.matrix import claimable

    more = {"policy_loss": _prepared, "distillation": _of_beta, "length_shaping": _lengths, "reward_pair": _pairs,
            "reward_ranking": _ranking, "reward_step": _steps, "supervised": _supervised, "unpaired": _unpaired}
    found = {}
    for name, row in {**ROWS, **_credits()}.items():
        if "." in name or row.alias_of:
            continue
        for family in rows.families_of(row) if row.family != "length_shaping" and name in ROWS else ():
            stated = (REDUCED.get(row.parts.get("reduction", "")), NAMED.get(name))
            claims = (*rows.claims_of(name, family), *(law for law in stated if law in claimable(family)))
            found[f"{name}: {family}"] = Wired(rows.function(row, family), family, claims)
        made = more[row.family](row) if row.family in more and not (row.family == "supervised" and name == "sft") else {}
        found |= {f"{name}: {kind}": wired for kind, wired in made.items()}
    return {name: wired._replace(row=name.split(":")[0]) for name, wired in found.items()}


def _credits() -> dict:
    """Rows of the credits that no row of the table has."""
    from jaxpt.objectives.algebra import compose
    from jaxpt.objectives.parts import CREDITS

    plain = dict(advantage="centred", ratio="none", surrogate="score", reduction="token_mean")
    names = {f"with credit {kind}": kind for kind in ("turn", "token", "steps", "channels")}
    return {name: compose(name, "", **plain, credit=kind, hyper=dict.fromkeys(CREDITS[kind].uses, 1.0))
            for name, kind in names.items()}


def _loss(row, **batch):
    return row.loss(**batch, **row.prepare(batch))


def _prepared(row) -> dict[str, Wired]:
    """What prepare makes of rewards of groups, of tokens, and of values."""
    import jax.numpy as jnp

    from jaxpt.types import bare_trajectory
    from jaxpt.verify.matrix import claimable

    def made(reward, mask, group, *, process=None, values=None, turns=1, **constants):
        tokens = jnp.zeros(mask.shape, jnp.int32)
        traj = bare_trajectory(tokens, mask > 0, reward=reward, group=group, old_logp=jnp.where(mask > 0, -1.0, 0.0))
        turn = tokens + jnp.arange(mask.shape[1])[None] // turns
        traj = traj._replace(parts=jnp.stack([reward, jnp.sign(reward)], 1), turn=turn)
        zeros = jnp.zeros(mask.shape)
        given = {"ref_logp": zeros - 1.0, "sampler_logp": zeros - 1.0, "anchor": traj.turn, "baseline": 0 * reward + 0.3}
        out = row.prepare(traj, process=process, values=zeros if values is None else values, **given, **constants)
        return jnp.where(out["mask"], out["advantages"], 0.0)

    def of_groups(rewards, group):
        return made(rewards, jnp.ones((len(rewards), 1)), group)[:, 0]

    def of_tokens(rewards, mask, gamma, turns=99):
        return made(jnp.zeros(len(mask)), mask, jnp.zeros(len(mask), jnp.int32), process=rewards, turns=turns)

    def of_values(rewards, values, mask, gamma, lam):
        named = {k: v for k, v in (("gamma", gamma), ("lam", lam)) if k in row.hyper}
        zeros = jnp.zeros(len(mask))
        return made(zeros, mask, zeros.astype(jnp.int32), process=rewards, values=values, turns=99, **named)

    wired = {
        "advantages of groups": Wired(
            of_groups, "group_advantage", tuple(c for c in row.claims if c in claimable("group_advantage"))
        ),
        "advantages of tokens": Wired(of_tokens, "returns"),
        "advantages of turns": Wired(lambda r, m, g: of_tokens(r, m, g, 2), "returns"),
    }
    return wired | ({"advantages of values": Wired(of_values, "gae")} if "values" in row.needs else {})


def _of_beta(row) -> dict[str, Wired]:
    def f(student_logits, teacher_logits, mask, beta):
        batch = {"student_logits": student_logits, "teacher_logits": teacher_logits, "mask": mask}
        return row.loss(**batch, **row.prepare(batch), beta=beta)

    stated = ("generalised_jsd",) * (row.name == "jsd")
    return {"of any beta": Wired(f, "distillation", stated)} if "beta" in row.hyper else {}


def _lengths(row) -> dict[str, Wired]:
    import jax.numpy as jnp

    def added(right):
        def f(length, max_length, buffer):
            given = ("max_length", max_length), ("buffer", buffer), ("lam", 0.05)
            hyper = {k: v for k, v in given if k in row.hyper}
            target, group = 0 * length + max_length - buffer, jnp.zeros(length.shape, jnp.int32)
            return row.loss(length, 0 * length + right, target, group, **hyper)

        return f

    return {"of right answers": Wired(added(1.0), "length_shaping"),
            "of wrong answers": Wired(added(0.0), "length_shaping")}


def _pairs(row) -> dict[str, Wired]:
    def f(x, mask):
        more = {"margin": 0.1 * x.ravel()} if "margin" in row.needs else {}
        return _loss(row, chosen_score=x.ravel(), rejected_score=-0.5 * x.ravel(), mask=mask.ravel(), **more)

    return {"with a mask": Wired(f, "aggregate")}


def _ranking(row) -> dict[str, Wired]:
    import jax.numpy as jnp

    def of_two(chosen_score, rejected_score):
        scores = jnp.stack([chosen_score, rejected_score, 7.0 + 0 * chosen_score], 1)
        return _loss(row, scores=scores, mask=jnp.broadcast_to(jnp.array([1.0, 1.0, 0.0]), scores.shape))

    return {"of two": Wired(of_two, "reward_model", ("log2_at_margin_0", "monotone", "shift_invariance")),
            "with a mask": Wired(lambda x, mask: _loss(row, scores=x, mask=mask), "aggregate")}


def _steps(row) -> dict[str, Wired]:
    import jax

    def f(label):
        return lambda v, old, r, mask: _loss(row, scores=v, labels=label(r), mask=mask)

    labels = {"labels between 0 and 1": jax.nn.sigmoid, "labels of 0 and 1": lambda r: 1.0 * (r > 0),
              "any labels": lambda r: r}
    return {name: Wired(f(label), "value_loss", ("declared_constants",)) for name, label in labels.items()}


def _supervised(row) -> dict[str, Wired]:
    import jax
    import jax.numpy as jnp

    def weights(mask):
        return {"weights": 0.7 * jnp.ones(mask.shape)} if "weights" in row.needs else {}

    def of_token(logits, token):
        mask = jnp.ones((1, 1))
        return -_loss(row, logits=logits[None, None], tokens=token[None, None], mask=mask, **weights(mask))[0]

    def each(logits, tokens):
        return jax.vmap(jax.vmap(of_token))(logits[:, :-1], tokens[:, 1:])

    def of_batch(student_logits, teacher_logits, mask):
        return _loss(row, logits=student_logits, tokens=jnp.argmax(teacher_logits, -1), mask=mask, **weights(mask))

    return {"of each token": Wired(each, "logprobs"), "of a batch": Wired(of_batch, "distillation")}


def _unpaired(row) -> dict[str, Wired]:
    import jax.numpy as jnp

    def f(x, mask):
        desirable = 1.0 * (jnp.where(mask > 0, x, 0).sum(1) > 0)
        more = {"kl_logp": 0.5 * x, "kl_ref_logp": 0 * x, "kl_mask": mask} if "kl_logp" in row.needs else {}
        return _loss(row, logp=x, ref_logp=-0.1 * x, desirable=desirable, mask=mask, **more)

    return {"with a mask": Wired(f, "aggregate")}
