"""Our objectives against TRL's, Tunix's and rlax's own functions on the same numbers: values and gradients.

A peer's loss that asks a model for log-probabilities is given a stand-in that hands out the test's. What a test
sets apart from the defaults (std_eps, ddof, the KL's estimator) is where the libraries' conventions differ.
"""

from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt.objectives import get
from jaxpt.objectives.value import gae
from jaxpt.types import bare_trajectory

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # the peers' own deprecations
]

G, P, T = 4, 3, 7
B = P * G
CLOSE = {"rtol": 2e-5, "atol": 1e-6}


def draw(seed: int) -> dict[str, np.ndarray]:
    """A batch whose ratios lie on both sides of every clip. Masks are ragged; position 0 decides nothing."""
    rng = np.random.default_rng(seed)
    length = rng.integers(2, T, size=B)
    old_logp = -rng.exponential(1.5, size=(B, T))
    return {
        "logp": np.float32(old_logp + 0.3 * rng.normal(size=(B, T))),
        "old_logp": np.float32(old_logp),
        "ref_logp": np.float32(old_logp + 0.5 * rng.normal(size=(B, T))),
        "mask": (np.arange(T)[None] >= 1) & (np.arange(T)[None] <= length[:, None]),
        "rewards": np.float32(rng.normal(size=B)),
        "advantages": np.float32(rng.normal(size=B)),
        "group": np.arange(B, dtype=np.int32) // G,
    }


def ours(name: str, x: dict, **hyper) -> tuple[float, np.ndarray]:
    """Loss of a row and its gradient in logp, at the advantages of x."""
    row = get(name)
    mask = jnp.asarray(x["mask"])
    tokens = jnp.zeros((B, T), jnp.int32)
    traj = bare_trajectory(tokens, mask, reward=jnp.asarray(x["rewards"]), group=jnp.asarray(x["group"]))
    totals = get("grpo_no_kl").prepare(traj)["totals"]  # tokens and rows of the whole batch
    extra = {"ref_logp": jnp.asarray(x["ref_logp"])} if "ref_logp" in row.needs else {}
    advantages = jnp.where(mask, x["advantages"][:, None], 0.0)

    def loss(logp):
        return row.loss(logp, jnp.asarray(x["old_logp"]), advantages, mask, totals=totals, **extra, **hyper)[0]

    value, grad = jax.jit(jax.value_and_grad(loss))(jnp.asarray(x["logp"]))
    return float(value), np.asarray(grad)


def trl_loss(peer, x: dict, **settings) -> tuple[float, np.ndarray]:
    """GRPOTrainer._compute_loss and its gradient, on a stand-in for the trainer."""
    torch, trainer = peer("torch"), peer("trl.trainer.grpo_trainer").GRPOTrainer
    tensors = {name: torch.tensor(value) for name, value in x.items()}
    logp = tensors["logp"].requires_grad_()
    same = SimpleNamespace(reduce=lambda x, reduction: x, gather=lambda x: x, num_processes=1)
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logp, torch.zeros(B, T), None),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        accelerator=same, model=SimpleNamespace(training=True), _metrics=defaultdict(lambda: defaultdict(list)),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1, max_completion_length=T,
        **{"importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, **settings},
    )  # fmt: skip
    mask = tensors["mask"].long()
    inputs = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long), "prompt_mask": torch.ones(B, 1, dtype=torch.long),
        "completion_ids": torch.zeros(B, T, dtype=torch.long), "completion_mask": mask,
        "advantages": tensors["advantages"], "old_per_token_logps": tensors["old_logp"],
        "ref_per_token_logps": tensors["ref_logp"], "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    loss = trainer._compute_loss(stand_in, None, inputs)
    loss.backward()
    return float(loss.detach()), logp.grad.numpy()


def agree(got: tuple, expected: tuple) -> None:
    np.testing.assert_allclose(got[0], expected[0], **CLOSE)
    np.testing.assert_allclose(got[1], expected[1], **CLOSE)
    assert np.abs(expected[1]).max() > 1e-3  # the comparison is about something


@pytest.mark.parametrize(
    "row, hyper, settings",
    [
        ("grpo", {"beta": 0.04}, {"loss_type": "grpo", "beta": 0.04}),
        ("grpo_no_kl", {"eps_high": 0.28}, {"loss_type": "grpo", "epsilon_high": 0.28}),
        ("dr_grpo", {"max_length": float(T)}, {"loss_type": "dr_grpo"}),
        ("dapo", {}, {"loss_type": "dapo", "epsilon_high": 0.28}),
        ("gspo", {"eps_low": 0.1, "eps_high": 0.2}, {
            "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1,
        }),
    ],
)  # fmt: skip
def test_policy_loss_is_trls(peer, row, hyper, settings):
    x = draw(0)
    agree(ours(row, x, **hyper), trl_loss(peer, x, **settings))


@pytest.mark.parametrize("row, algo", [("grpo", "grpo"), ("gspo_token", "gspo-token")])
def test_policy_loss_is_tunixs(peer, monkeypatch, row, algo):
    core, common = peer("tunix.rl.algo_core"), peer("tunix.rl.common")
    nnx = peer("flax.nnx")
    x = draw(1)
    beta = 0.04 if row == "grpo" else 0.0
    config = SimpleNamespace(
        beta=beta, epsilon=0.2, epsilon_high=0.2, loss_algo=algo, loss_agg_mode="sequence-mean-token-mean",
        temperature=1.0, kl_loss_mode="low_var_kl", kl_clamp_value=None,
    )  # fmt: skip
    example = SimpleNamespace(
        prompt_ids=None, completion_ids=None, completion_mask=jnp.float32(x["mask"]),
        advantages=jnp.asarray(x["advantages"]), old_per_token_logps=jnp.asarray(x["old_logp"]),
        ref_per_token_logps=jnp.asarray(x["ref_logp"]) if beta else None,
    )  # fmt: skip

    def loss(logp):
        monkeypatch.setattr(common, "compute_per_token_logps", lambda *args, **kwargs: (logp, jnp.zeros((B, T, 2))))
        return core.grpo_loss_fn(nnx.Dict(), example, config, pad_id=0, eos_id=0)[0]

    value, grad = jax.value_and_grad(loss)(jnp.asarray(x["logp"]))
    hyper = {"eps_low": 0.2, "eps_high": 0.2} | ({"beta": beta} if beta else {})
    agree(ours(row, x, **hyper), (float(value), np.asarray(grad)))


def test_clipped_surrogate_is_rlaxs(peer):
    rlax = peer("rlax")
    x = draw(2) | {"mask": np.broadcast_to(np.arange(T) >= 1, (B, T))}  # rows of one length: token mean = row mean
    advantages = np.broadcast_to(x["advantages"][:, None], (B, T))[:, 1:].reshape(-1)

    def loss(logp):
        ratios = jnp.exp(logp - x["old_logp"])[:, 1:].reshape(-1)
        return rlax.clipped_surrogate_pg_loss(ratios, jnp.asarray(advantages), 0.2)

    value, grad = jax.value_and_grad(loss)(jnp.asarray(x["logp"]))
    agree(ours("grpo_no_kl", x), (float(value), np.asarray(grad)))


@pytest.mark.parametrize("row, hyper", [("grpo", {"std_eps": 1e-6}), ("rloo", {}), ("dr_grpo", {})])
def test_group_advantages_are_tunixs(peer, row, hyper):
    core = peer("tunix.rl.algo_core")
    theirs = {
        "grpo": core.compute_advantages, "rloo": core.compute_rloo_advantages, "dr_grpo": core.compute_drgrpo_advantages
    }
    x = draw(3)
    traj = bare_trajectory(
        jnp.zeros((B, T), jnp.int32), jnp.asarray(x["mask"]), reward=jnp.asarray(x["rewards"]),
        group=jnp.asarray(x["group"]),
    )  # fmt: skip
    got = get(row).prepare(traj, **hyper)["advantages"]
    expected = np.where(x["mask"], np.asarray(theirs[row](x["rewards"], num_generations=G))[:, None], 0.0)
    np.testing.assert_allclose(got, expected, **CLOSE)


def test_k3_is_tunixs_low_variance_kl(peer):
    """The KL term alone: equal policies and advantages of 0 leave beta k3."""
    common = peer("tunix.rl.common")
    x = draw(4) | {"advantages": np.zeros(B, np.float32)}
    mask = jnp.asarray(x["mask"], jnp.float32)

    def loss(logp):
        kl = common.compute_kl_divergence(logp, jnp.asarray(x["ref_logp"]), "low_var_kl")
        return 0.5 * common.aggregate_loss(kl, mask, "sequence-mean-token-mean")

    value, grad = jax.value_and_grad(loss)(jnp.asarray(x["logp"]))
    agree(ours("grpo", x, beta=0.5), (float(value), np.asarray(grad)))


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0)])
def test_gae_is_rlaxs(peer, gamma, lam):
    """Row by row on the trained tokens, with a value behind the last step."""
    rlax = peer("rlax")
    rng = np.random.default_rng(5)
    x, final = draw(5), np.float32(rng.normal(size=B))
    rewards, values = np.float32(rng.normal(size=(2, B, T)))
    got = gae(jnp.asarray(rewards), jnp.asarray(values), jnp.asarray(x["mask"]), gamma, lam, jnp.asarray(final))
    for row, mask in enumerate(x["mask"]):
        n = int(mask.sum())
        expected = rlax.truncated_generalized_advantage_estimation(
            jnp.asarray(rewards[row, mask]), jnp.full(n, gamma), lam,
            jnp.asarray(np.append(values[row, mask], final[row])),
        )  # fmt: skip
        np.testing.assert_allclose(np.asarray(got)[row, mask], expected, rtol=2e-5, atol=1e-5)
