"""The comparison's own arithmetic: fair arms, claims that can fail, and twins that are what they say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.envs import exact, make
from jaxpt.experiments import objectives
from jaxpt.objectives import get
from jaxpt.train.estimators import EstimatorConfig, make_estimators
from jaxpt.train.expected import expected_gradient

CONFIG = objectives.EXPERIMENT.tiers["cpu"].config
STAGES = {stage.name: stage for stage in objectives.stages(CONFIG, {})}
ARMS = (*objectives.ROWS, "rloo_hot", "grpo_hot", "coin")


def test_arms_differ_in_their_leaves_alone():
    """One compiled program, one start, one stream of tasks and draws, one number of updates."""
    first = STAGES[ARMS[0]]
    for name in ARMS:
        stage = STAGES[name]
        assert (stage.make, stage.config, stage.steps, stage.after, stage.stream) == (
            first.make, first.config, first.steps, "start", "policy")
    for row in objectives.ROWS:
        hyper, own = STAGES[row].hyper, get(row).hyper
        assert hyper["row"] == objectives.ROWS.index(row) and hyper["learning_rate"] == getattr(CONFIG, f"{row}_rate")
        changed = {k for k, v in own.items() if hyper[k] != v}
        assert changed <= {"max_length", "buffer", "max_rounds"} | ({"eps_low", "eps_high"} if row == "gspo" else set())
    assert STAGES["coin"].hyper == STAGES["grpo"].hyper | {"reward_noise": 1.0}
    assert STAGES["rloo_hot"].hyper == STAGES["rloo"].hyper | {"learning_rate": CONFIG.hot_rate}
    assert STAGES["dapo"].hyper["max_length"] == CONFIG.env().make().spec.response_len


def fabricated(**last):
    """Curves that end where `last` says, 0.5 otherwise, for 3 seeds; exact numbers are 1 but for those given."""
    curves = {"seeds": np.arange(3)}
    for name in ("start", *ARMS):
        curves[f"{name}/sampled_gold"] = np.full((3, 2), last.get(name, 0.5))
        curves[f"{name}/generated"] = np.broadcast_to([100.0, 200.0], (3, 2))
    for row in objectives.ROWS:
        for what in ("noise", "bias"):
            curves[f"exact/{what}_{row}_world"] = np.full((3, 2, 4), last.get(f"{what}_{row}", 1.0))
    return curves


@pytest.mark.parametrize("claim, ends, value", [
    ("every_objective_learns", {"start": 0.3, "ppo": 0.45}, 0.15), ("rloo_beats_reinforce", {"rloo": 0.6}, 0.1),
    ("dapo_beats_grpo", {"dapo": 0.4}, -0.1), ("dapo_beats_grpo_per_token", {"dapo": 0.4}, -0.1),
    ("rloo_needs_no_critic", {"ppo": 0.54}, 0.01),
    ("a_clip_survives_a_hot_rate", {"rloo_hot": 0.1}, 0.4), ("a_baseline_cuts_noise", {"noise_reinforce": 1.5}, 0.5),
    ("standardising_turns_the_update", {"bias_grpo": 1.1}, 0.1),
])
def test_a_claim_reads_what_it_says(claim, ends, value):
    (found,) = [c for c in objectives.CLAIMS if c.name == claim]
    estimates = found.estimand(fabricated(**ends))
    assert estimates.shape == ((12,) if found.unit == "world" else (3,))
    np.testing.assert_allclose(estimates, value, atol=1e-9)
    assert found.control(fabricated(**ends)).shape == estimates.shape


def test_success_per_token_is_read_between_evaluations():
    """An arm that spends twice as much is read where it had spent what the other did in all; NaN is no evaluation."""
    curves = {"a/sampled_gold": np.array([[np.nan, 0.2, np.nan, 0.6]]), "a/generated": np.array([[50.0, 100, 200, 300]]),
              "b/generated": np.array([[10.0, 150.0]])}
    np.testing.assert_allclose(objectives.at_tokens_of("a", "b")(curves), [0.3])


@pytest.mark.parametrize("field, value, sentence", [
    ("updates", 30, "--updates 30: expected a multiple of 20"), ("p", 6, "--p 6 --generators 4: p is 6"),
    ("minibatches", 3, "--minibatches 3: expected a divisor of --prompts 16"), ("gspo_clip", 2.0, "--gspo-clip 2.0"),
    ("twin_ppo_rate", -1.0, "--twin-ppo-rate -1.0"),
])
def test_bad_values_are_told_in_the_command_line_s_words(field, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG, **{field: value})


def test_every_field_of_the_sweep_is_a_field():
    for table in objectives.SWEEP:
        for field, (values, metric) in table.items():
            assert len(set(values)) > 2 and hasattr(CONFIG, field) and metric.split("/")[0] in STAGES


def test_the_exact_twin_against_its_parts():
    """At the uniform policy: RLOO climbs J, GRPO does not quite; noise is the moments' own."""
    cfg = EstimatorConfig(objectives=("rloo", "grpo_no_kl"), group=2, worlds=2)
    program = make_estimators(cfg)
    state = program.init(jax.random.key(0), {k: jnp.float32(v) for k, v in program.hyper.items()})
    after, out = jax.jit(program.step)(state)
    np.testing.assert_allclose(out["bias_rloo_world"], 0, atol=1e-5)
    assert (np.asarray(out["bias_grpo_no_kl_world"]) > 1e-3).all()
    env = make("tree", vocab=cfg.vocab, depth=cfg.depth)
    shape = exact.leaves(env, env.sample(jax.random.key(0), jnp.int32(1)), jax.random.key(0))
    leaves = shape._replace(reward=state["reward"][1])
    logits = state["params"]["logits"][1]
    mean, variance = expected_gradient(get("rloo"), leaves, logits, 2)
    np.testing.assert_allclose(out["noise_rloo_world"][1], np.sqrt(variance) / np.linalg.norm(mean), rtol=1e-4)
    np.testing.assert_allclose(out["J_world"][1], exact.value(logits, leaves), rtol=1e-6)
    ascent = jax.grad(exact.value)(logits, leaves)
    np.testing.assert_allclose(after["params"]["logits"][1], logits + cfg.learning_rate * ascent, rtol=1e-5)
