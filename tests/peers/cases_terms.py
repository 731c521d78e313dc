"""What losses are made of, function by function: aggregations, KL estimators, entropies, critics, controllers."""

from types import SimpleNamespace
from unittest.mock import patch

import jax.numpy as jnp
from cases_policy import SKYRL_AT
from parity import V, Case
from wheels import Config

from jaxpt.objectives import kl, peer_parts, reduction, value
from jaxpt.objectives.reduction import totals_of
from jaxpt.ops.logprobs import token_stats

CORE = "verl.trainer.ppo.core_algos"


# --- aggregations: of the per-token losses logp


def reduced(part):
    def ours(x):
        return part(x["logp"], x["mask"], totals_of(x["mask"]))

    return ours


def aggregation(peer, mode, part, call, framework="torch", dtype="float64"):
    return Case(peer, mode, call, reduced(part), {}, framework=framework, dtype=dtype)


BY_NAME = lambda mode: lambda call, x: call(x["logp"], x["m"], mode)  # noqa: E731
AGGREGATIONS = [
    *(aggregation(f"{CORE}:agg_loss", mode, part, BY_NAME(mode)) for mode, part in {
        "token-mean": reduction.token_mean, "token-sum": reduction.token_sum, "seq-mean-token-sum": reduction.sequence_sum,
        "seq-mean-token-sum-norm": peer_parts.padded_mean, "seq-mean-token-mean": reduction.sequence_mean,
    }.items()),
    *(aggregation("tunix.rl.common:aggregate_loss", mode, part, BY_NAME(mode), "jax", "float32") for mode, part in {
        "token-mean": reduction.token_mean, "sequence-mean-token-mean": reduction.sequence_mean,
        "sequence-mean-token-scale": peer_parts.padded_mean, "seq-mean-token-sum": reduction.sequence_sum,
        "sequence-mean-token-sum-norm": reduction.sequence_sum,
    }.items()),
    *(aggregation("openrlhf.models.loss:aggregate_loss", mode, part,
                  lambda call, x, by_token=mode == "token": call(x["logp"], x["m"], token_level_loss=by_token)) for mode, part in {
        "token": reduction.token_mean, "sequence": reduction.sequence_mean,
    }.items()),
    aggregation("openrlhf.models.loss:SFTLoss", "token", lambda logp, mask, totals: -reduction.token_mean(logp, mask, totals),
                lambda cls, x: cls()(x["logp"], x["m"])),
    aggregation(f"{SKYRL_AT}:cross_entropy_loss", "sum", lambda logp, mask, totals: -reduction.token_sum(logp, mask, totals),
                lambda call, x: call(x["logp"], x["old_logp"], x["advantages"], Config(), x["m"])[0]),
]  # fmt: skip


# --- KL estimators, [B,T]


BY_NAME_OF_PAIR = lambda mode: lambda call, x: call(x["logp"], x["ref_logp"], mode)  # noqa: E731


def estimator(peer, mode, ours, call, *, constants=(), masks="extreme", framework="torch", dtype="float64"):
    return Case(peer, mode, call, ours, dict(constants), masks=masks, framework=framework, dtype=dtype)


def of(function):
    return lambda x: function(x["logp"], x["ref_logp"])


def pulling(gradient, function):
    return lambda x: gradient(function, x["logp"], x["old_logp"], x["ref_logp"])


def verl(mode, ours):
    return estimator(f"{CORE}:kl_penalty", mode, ours, BY_NAME_OF_PAIR(mode))


def openrlhf(mode, ours, **settings):
    def call(function, x):
        return function(x["logp"], x["ref_logp"], kl_estimator=mode.rstrip("+"), **settings)

    return estimator("openrlhf.models.utils:compute_approx_kl", mode, ours, call, dtype="float32", masks="holes")


CLAMPED = lambda function: lambda *logps: jnp.clip(function(*logps), -10.0, 10.0)  # noqa: E731
KL = [
    verl("k1", of(kl.k1)), verl("abs", of(kl.absolute)), verl("k2", of(kl.k2)), verl("k3", of(peer_parts.k3_clamped)),
    verl("k1+", pulling(kl.k2_gradient, kl.k1)), verl("k3+", pulling(kl.k2_gradient, peer_parts.k3_clamped)),
    *(estimator("tunix.rl.common:compute_kl_divergence", mode, of(ours), BY_NAME_OF_PAIR(mode), framework="jax", dtype="float32",
                masks="holes") for mode, ours in {"kl": kl.k1, "mse_kl": kl.k2, "low_var_kl": kl.k3}.items()),
    *(estimator(f"{SKYRL_AT}:compute_approx_kl", mode, of(ours),
                lambda call, x, mode=mode: call(x["logp"], x["ref_logp"], None, mode))
      for mode, ours in {"k1": kl.k1, "abs": kl.absolute, "k2": kl.k2, "k3": peer_parts.k3_clamped}.items()),
    openrlhf("k1", of(peer_parts.k1_clamped)), openrlhf("k2", of(CLAMPED(kl.k2))), openrlhf("k3", of(peer_parts.k3_clamped)),
    openrlhf("k1+", pulling(kl.k2_gradient, peer_parts.k1_clamped), unbiased_gradient=True),
]  # fmt: skip


# --- critics


def critic(x, value_clip):
    return value.clipped_value_loss(
        x["values"], x["old_values"], x["returns"], x["mask"], totals=totals_of(x["mask"]), value_clip=value_clip
    )[0]


def tunix_critic(call, x):
    from tunix.rl import common

    example = SimpleNamespace(
        prompt_ids=None, completion_ids=x["m"], completion_mask=x["m"], old_values=x["old_values"], returns=x["returns"]
    )
    with patch.object(common, "compute_score", lambda *args, **kwargs: jnp.pad(x["values"], ((0, 0), (0, 1)))):
        return call(None, example, 0.5, 0, 0)[0]


CRITIC = dict(constants={"value_clip": 0.5}, wrt=("values",))
CRITICS = [
    Case(f"{CORE}:compute_value_loss", "token-mean",
         lambda call, x: call(x["values"], x["returns"], x["old_values"], x["m"], 0.5)[0], critic, **CRITIC),
    Case("openrlhf.models.loss:ValueLoss", "token",
         lambda cls, x: cls(clip_eps=0.5)(x["values"], x["old_values"], x["returns"], x["m"]), critic, **CRITIC),
    Case("tunix.rl.algo_core:ppo_value_loss_fn", "default", tunix_critic, critic, **CRITIC, framework="jax"),
]  # fmt: skip


# --- entropies of logits


def entropy(x):
    behind = jnp.pad(x["logits"], ((0, 0), (0, 1), (0, 0)))  # logits at t decide the token at t + 1
    return token_stats(behind, jnp.eye(V), jnp.zeros(behind.shape[:2], jnp.int32), want=("entropy",))["entropy"][:, 1:]


OF_LOGITS = dict(ours=entropy, constants={}, wrt=("logits",), masks="full")
ENTROPIES = [
    Case("verl.utils.torch_functional:entropy_from_logits", "default", lambda call, x: call(x["logits"]), **OF_LOGITS),
    Case("tunix.rl.algo_core:compute_entropy_from_logits", "default", lambda call, x: call(x["logits"]), **OF_LOGITS, framework="jax"),
    Case("skyrl.backends.skyrl_train.utils.torch_utils:chunked_entropy_from_logits", "default",
         lambda call, x: call(x["logits"], requires_grad=True), **OF_LOGITS),
]  # fmt: skip


# --- what follows a target, and rewards


def followed(cls, x):
    controller = cls(0.1, 6.0, 10000.0)
    controller.update(float(x["baseline"][0]) + 6.0, 256)
    return controller.value


def follow(x, beta, kl_target, kl_horizon):
    return kl.adapted(beta, x["baseline"][0] + 6.0, kl_target=kl_target, kl_horizon=kl_horizon, rows=256)


ADAPTIVE = dict(constants={"beta": 0.1, "kl_target": 6.0, "kl_horizon": 10000.0}, wrt=())
OTHERS = [
    *(Case(f"{module}:AdaptiveKLController", "update", followed, follow, **ADAPTIVE)
      for module in (CORE, "openrlhf.trainer.ppo_utils.kl_controller", SKYRL_AT)),
    Case(f"{CORE}:compute_rewards", "default", lambda call, x: call(x["token_rewards"], x["old_logp"], x["ref_logp"], 0.1),
         lambda x, beta: x["token_rewards"] - beta * kl.k1(x["old_logp"], x["ref_logp"]), {"beta": 0.1}, wrt=()),
]  # fmt: skip

CASES = [*AGGREGATIONS, *KL, *CRITICS, *ENTROPIES, *OTHERS]
