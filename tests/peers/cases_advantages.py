"""Advantages and returns: the peer's own estimator, and what the row of that estimator makes of the same rewards."""

import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from cases_policy import PEERS, SKYRL_AT
from parity import Case, G, of_prepare
from wheels import Config

from jaxpt.objectives import value

CORE = "verl.trainer.ppo.core_algos"
VAR = {"var_eps": 1e-8}  # of advantages of size 1: a change of it is none

# --- verl


def outcome(call, x, **more):
    """(advantages, returns) of the rewards of responses; the second are the first."""
    return {"advantages": call(x["token_rewards"], x["m"], index=np.asarray(x["group"]), **more)[0] * x["m"]}


def with_values(call, x, **more):
    advantages, returns = call(x["token_rewards"], x["values"], x["m"], **more)
    return {"advantages": advantages * x["m"], "returns": returns * x["m"]}


def over_returns(call, x, **more):
    return {"advantages": call(x["token_rewards"], x["m"], **more)[0] * x["m"]}


def over_parts(call, x):
    import torch

    mask, width = x["m"], x["m"].shape[1]
    keys = {"gdpo_reward_keys": ["a", "b"]}
    return outcome(
        call, x, config=Config(**keys), non_tensor_batch=dict(zip("ab", x["parts"].T.numpy(), strict=True)),
        batch={"prompts": torch.zeros(len(mask), 1), "attention_mask": torch.ones(len(mask), 1 + width, dtype=torch.long)},
    )


def verl(name, constants, call=outcome, *, row="", given=(), masks="rows", reads=(), dtype="float64", mode="default"):
    ours = of_prepare(PEERS[row], *reads)
    return Case(f"{CORE}:compute_{name}", mode, call, ours, constants, dict(given), (), masks, dtype=dtype)


STD = {"std_eps": 1e-6, "ddof": 1.0}
GAE = {"gamma": 0.9, "lam": 0.8, "ddof": 1.0}
VERL = [
    verl("gae_advantage_return", GAE, partial(with_values, gamma=0.9, lam=0.8), row="verl.ppo", reads=("returns",),
         given=VAR.items()),
    verl("grpo_outcome_advantage", STD, row="verl.grpo"),
    verl("grpo_outcome_advantage", {}, partial(outcome, norm_adv_by_std_in_grpo=False), row="verl.dr_grpo", mode="no-std"),
    verl("grpo_vectorized_outcome_advantage", STD, row="verl.grpo"),
    verl("grpo_passk_outcome_advantage", STD, partial(outcome, config=Config()), row="verl.grpo_passk"),
    # it gets each reward where attention_mask ends, so its rows end there: no mask; and in float32
    verl("gdpo_outcome_advantage", {"std_eps": 1e-6}, over_parts, row="verl.gdpo", given={**VAR, "ddof": 1.0}.items(),
         masks="full", dtype="float32"),
    verl("reinforce_plus_plus_outcome_advantage", {"gamma": 0.9, "var_eps": 1e-8, "ddof": 1.0},
         partial(over_returns, config=Config(gamma=0.9)), row="verl.reinforce_plus_plus"),
    verl("reinforce_plus_plus_baseline_outcome_advantage", {"var_eps": 1e-8, "ddof": 1.0},
         row="verl.reinforce_plus_plus_baseline"),
    verl("rloo_outcome_advantage", {}, row="verl.rloo"),
    verl("rloo_vectorized_outcome_advantage", {}, row="verl.rloo_vectorized"),
    verl("opo_outcome_advantage", {}, row="verl.opo"),
    verl("gpg_outcome_advantage", {}, row="verl.gpg"),
    verl("remax_outcome_advantage", {}, lambda call, x: over_returns(lambda r, m: call(r, x["baseline"], m), x),
         row="verl.remax"),
]  # fmt: skip

# --- OpenRLHF: one method for all estimators, on a stand-in for the maker


def openrlhf(method, x, estimator, gamma=1.0, lam=1.0, beta=0.0):
    maker = sys.modules["openrlhf.trainer.ppo_utils.experience_maker"].RemoteExperienceMaker
    utils = sys.modules["openrlhf.models.utils"]
    args = Config(
        algo=Config(advantage=Config(estimator=estimator, gamma=gamma, lambd=lam, no_std_norm=False)),
        rollout=Config(n_samples_per_prompt=int((x["group"] == x["group"][0]).sum())), reward=Config(clip_range=(-10.0, 10.0)),
    )
    self = SimpleNamespace(strategy=Config(args=args), advantage_estimator=estimator, kl_ctl=Config(value=beta))
    for name in ("get_advantages_and_returns", "get_cumulative_returns"):
        setattr(self, name, partial(getattr(maker, name), self))
    kl = utils.compute_approx_kl(x["old_logp"], x["ref_logp"]) if beta else 0.0 * x["m"]
    experience = SimpleNamespace(
        index=list(range(len(x["m"]))), rewards=x["untied"], kl=kl, action_mask=x["m"], values=x["values"], info={}
    )
    method(self, [experience])
    gae = {"returns": experience.returns * x["m"]} if estimator == "gae" else {}
    return {"advantages": experience.advantages * x["m"], **gae}


def openrlhf_case(estimator, row, constants, *, given=(), reads=(), dtype="float64", **settings):
    name = "openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.compute_advantages_and_returns"
    ours = of_prepare(PEERS[row], *reads, reward="untied")
    call = partial(openrlhf, estimator=estimator, **settings)
    return Case(name, estimator, call, ours, constants, dict(given), (), "rows", dtype=dtype)


FLOOR = {"var_floor": 1e-8}
OPENRLHF = [
    openrlhf_case("gae", "openrlhf.ppo", {"gamma": 0.9, "lam": 0.8, "beta": 0.1}, reads=("returns",), given=FLOOR.items(),
                  gamma=0.9, lam=0.8, beta=0.1, dtype="float32"),
    openrlhf_case("reinforce", "openrlhf.reinforce", {"gamma": 0.9, "beta": 0.1}, given=FLOOR.items(), gamma=0.9, beta=0.1,
                  dtype="float32"),
    openrlhf_case("rloo", "openrlhf.rloo", {}),
    openrlhf_case("reinforce_baseline", "openrlhf.reinforce_baseline", {}, given=FLOOR.items()),
    openrlhf_case("group_norm", "openrlhf.group_norm", {"std_eps": 1e-9, "ddof": 1.0}),
    openrlhf_case("dr_grpo", "openrlhf.dr_grpo", {}),
    openrlhf_case("flash_reinforce", "openrlhf.flash_reinforce", {}),
]  # fmt: skip


# --- Tunix


def of_group(call, x):
    return {"advantages": jnp.where(x["mask"], call(x["rewards"], G)[:, None], 0.0)}


def tunix(name, row, constants, call=of_group, given=(), reads=(), masks="rows"):
    ours = of_prepare(PEERS[row], *reads)
    return Case(f"tunix.rl.algo_core:{name}", "default", call, ours, constants, dict(given), (), masks, "jax")


TUNIX = [
    tunix("compute_gae_advantages", "tunix.ppo", GAE, lambda call, x: with_values(lambda *a: call(*a, 0.9, 0.8), x), VAR.items(),
          ("returns",)),
    tunix("compute_advantages", "tunix.grpo", STD),
    tunix("compute_rloo_advantages", "openrlhf.rloo", {}),
    tunix("compute_drgrpo_advantages", "tunix.drgrpo", {}),
]  # fmt: skip

# --- SkyRL: statistics of groups in float32; its discounting knows no tool tokens, so there are none here


def skyrl(name, row, constants, call=outcome, *, given=(), reads=(), masks="rows", reward="rewards", dtype="float64"):
    ours = of_prepare(PEERS[row], *reads, reward=reward)
    return Case(f"{SKYRL_AT}:compute_{name}", "default", call, ours, constants, dict(given), (), masks, dtype=dtype)


def of_untied(call, x):
    return outcome(call, {"m": x["m"], "group": x["group"], "token_rewards": x["last"] * x["untied"][:, None]})


SKYRL = [
    skyrl("reinforce_plus_plus_outcome_advantage", "verl.reinforce_plus_plus", {"gamma": 0.9, "var_eps": 1e-8, "ddof": 1.0},
          partial(over_returns, gamma=0.9), masks="full"),
    skyrl("gae_advantage_return", "verl.ppo", GAE, partial(with_values, gamma=0.9, lambd=0.8), reads=("returns",),
          given=VAR.items(), masks="full"),
    skyrl("rloo_outcome_advantage", "skyrl.rloo", {}),
    skyrl("grpo_outcome_advantage", "skyrl.regular", STD, of_untied, reward="untied", dtype="float32"),
    skyrl("maxrl_advantage", "skyrl.maxrl", {"mean_eps": 1e-6}, of_untied, reward="untied", dtype="float32"),
]  # fmt: skip


# --- rlax: one trajectory without a mask


def by_row(function):
    """function(rewards [T], values [T+1], log_ratio [T]) of every row."""

    def call(of, x):
        values = jnp.concatenate([x["values"], x["old_values"][:, :1]], axis=1)
        return jax.vmap(partial(function, of))(x["returns"], values, x["logp"] - x["old_logp"])

    return call


def rlax(name, function, ours, constants):
    def of_batch(x, **constants):
        return ours(x["returns"], x["values"], x["mask"], x["old_values"][:, 0], x["logp"] - x["old_logp"], **constants)

    return Case(f"rlax:{name}", "default", by_row(function), of_batch, constants, {}, ("returns", "values"), "full", "jax")


RLAX = [
    rlax("truncated_generalized_advantage_estimation", lambda f, r, v, d: f(r, jnp.full_like(r, 0.9), 0.8, v),
         lambda r, v, m, final, d, gamma, lam: value.gae(r, v, m, gamma, lam, final), {"gamma": 0.9, "lam": 0.8}),
    rlax("lambda_returns", lambda f, r, v, d: f(r, jnp.full_like(r, 0.9), v[1:], 0.8),
         lambda r, v, m, final, d, gamma, lam: value.gae(r, v, m, gamma, lam, final) + v, {"gamma": 0.9, "lam": 0.8}),
    rlax("discounted_returns", lambda f, r, v, d: f(r, jnp.full_like(r, 0.9), v[-1]),
         lambda r, v, m, final, d, gamma: value.gae(r, v, m, gamma, 1.0, final) + v, {"gamma": 0.9}),
    rlax("n_step_bootstrapped_returns", lambda f, r, v, d: f(r, jnp.full_like(r, 0.9), v[1:], 2),
         lambda r, v, m, final, d, gamma: value.n_step(r, v, m, gamma, 2.0, final) + v, {"gamma": 0.9}),
    rlax("vtrace", lambda f, r, v, d: f(v[:-1], v[1:], r, jnp.full_like(r, 0.9), jnp.exp(d), 0.8, 1.0, False),
         lambda r, v, m, final, d, gamma, lam: value.v_trace(r, v, d, m, gamma, final, lam=lam)[0] - v, {"gamma": 0.9, "lam": 0.8}),
]  # fmt: skip

CASES = [*VERL, *OPENRLHF, *TUNIX, *SKYRL, *RLAX]
