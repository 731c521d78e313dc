"""What every row makes of rewards before its loss, against float64 loops written from the papers; and the laws of
shaping, selection and credit."""

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from prepare_loops import HYPER, POLICY, TESTED, B, T, loop

from jaxpt.objectives import ROWS, shaping
from jaxpt.types import bare_trajectory

SHARDS, WIDTH = 4, 4  # shards of whole groups, padded with empty rows to one width
seeds = st.integers(0, 2**31 - 1)
GIVEN = ("ref_logp", "values", "final_values", "process", "baseline", "anchor", "sampler_logp")
AT_LOSS = ("ref_logp", "entropy", "vocab_kl", "sampler_logp", "weights", "prompt_tokens")


def share(row, batch, hyper, total=lambda tree: tree):
    """One shard of a batch: what prepare makes of it, and its share of the loss."""
    ready = row.prepare(batch["traj"], **{k: batch[k] for k in GIVEN}, total=total, **hyper)
    logp, ref_logp = batch["logp"], batch["ref_logp"]
    stats = {"ref_logp": ref_logp, "entropy": batch["values"], "vocab_kl": batch["values"], "sampler_logp": logp, "weights": logp}
    extra = {k: {**stats, **ready}[k] for k in AT_LOSS if k in row.needs}
    loss = row.loss(
        batch["logp"], batch["traj"].old_logp, ready["advantages"], ready["mask"], totals=ready["totals"], **extra, **hyper
    )[0]
    return {**ready, "loss": loss}


@jax.jit
def battery(batch, hyper):
    return {name: share(row, batch, hyper[name]) for name, row in TESTED.items()}


@jax.jit
def sharded(batches, hyper):
    total = partial(jax.lax.psum, axis_name="shard")
    one = lambda batch: {name: share(row, batch, hyper[name], total) for name, row in POLICY.items()}  # noqa: E731
    return jax.vmap(one, axis_name="shard")(batches)


def run(batch, hyper=HYPER):
    return jax.device_get(battery(batch, hyper))


def draw(seed):
    """Groups of 1 to 4 in any order, holes in the mask, rows without a decision, missing rewards, turns,
    truncated rows; nonsense wherever nothing may be read."""
    rng = np.random.default_rng(seed)
    mask = rng.random((B, T)) < rng.choice([0.5, 0.8, 1.0])
    mask[rng.integers(B), :] &= rng.random() < 0.5
    begins = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    turn = np.where(mask, np.maximum(np.cumsum(begins, axis=1) - 1, 0), 0)
    reward = rng.choice([0.0, 1.0, 0.3, -2.0], B) if rng.random() < 0.7 else rng.integers(0, 2, B).astype(float)
    reward[rng.random(B) < 0.15] = rng.choice([np.nan, np.inf, -np.inf])
    group = rng.permutation(np.repeat([4, 9, -1], [3, 1, 4]) if rng.random() < 0.5 else np.arange(B) // 2)
    nonsense = lambda x: np.where(mask, x, np.nan).astype(np.float32)  # noqa: E731
    logp = rng.normal(-1, 0.5, (B, T))
    traj = bare_trajectory(
        np.zeros((B, T), np.int32), mask, reward=reward.astype(np.float32), group=group.astype(np.int32),
        old_logp=nonsense(logp), length=np.full(B, T, np.int32),
    )
    parts = np.where(np.isfinite(reward)[:, None], rng.choice([0.0, 1.0, 0.3], (B, 2)), np.nan)
    traj = traj._replace(turn=turn.astype(np.int32), truncated=rng.random(B) < 0.3, parts=parts.astype(np.float32))
    state = rng.integers(0, 3, (B, T))
    batch = {
        "traj": jax.tree.map(np.asarray, traj), "logp": nonsense(logp + rng.normal(0, 0.2, (B, T))),
        "ref_logp": nonsense(logp + rng.normal(0, 0.3, (B, T))), "values": nonsense(rng.normal(size=(B, T))),
        "final_values": np.where(traj.truncated, rng.normal(size=B), np.nan).astype(np.float32),
        "process": nonsense(rng.choice([0.0, 0.25, -0.5], (B, T)) * (rng.random() < 0.7)),
        "baseline": rng.choice([0.0, 1.0, 0.4, np.nan], B).astype(np.float32),
        "anchor": np.where(mask, np.take_along_axis(state, turn, 1), rng.integers(-99, 99, (B, T))).astype(np.int32),
    }
    batch["sampler_logp"] = nonsense(logp + rng.normal(0, 0.3, (B, T)))
    return batch, rng


@given(seed=seeds)
def test_against_float64_loops(seed):
    batch, _ = draw(seed)
    for name, got in run(batch).items():
        with np.errstate(invalid="ignore"):
            want = loop(name, batch)
        np.testing.assert_array_equal(got["mask"], want["mask"], err_msg=name)
        assert {k: got["totals"][k] for k in want["totals"]} == want["totals"]
        np.testing.assert_allclose(got["advantages"], want["advantages"], rtol=1e-3, atol=2e-5, err_msg=name)
        if "values" in TESTED[name].needs:
            np.testing.assert_allclose(got["returns"], want["returns"], rtol=1e-4, atol=1e-5)


@given(seed=seeds)
def test_shards_of_whole_groups_make_the_whole(seed):
    """prepare with psum over uneven shards gives the advantages and totals of the whole batch, and the shares of
    the loss add up to its loss: one update does not depend on the number of devices, for every row."""
    batch, rng = draw(seed)
    shard_of = dict(zip(np.unique(batch["traj"].group), rng.integers(0, SHARDS, B), strict=False))
    rows = [[i for i in range(B) if shard_of[batch["traj"].group[i]] == s] for s in range(SHARDS)]
    while max(map(len, rows)) > WIDTH:  # move the last group of a full shard to the emptiest
        full, free = max(range(SHARDS), key=lambda s: len(rows[s])), min(range(SHARDS), key=lambda s: len(rows[s]))
        group = batch["traj"].group[rows[full][-1]]
        moving = [i for i in rows[full] if batch["traj"].group[i] == group]
        rows[full], rows[free] = [i for i in rows[full] if i not in moving], rows[free] + moving
    index = np.array([r + [0] * (WIDTH - len(r)) for r in rows])
    real = np.array([[k < len(r) for k in range(WIDTH)] for r in rows])
    parts = jax.tree.map(lambda x: x[index], batch)
    empty = {"mask": parts["traj"].mask & real[..., None], "reward": np.where(real, parts["traj"].reward, 1e9)}
    parts["traj"] = parts["traj"]._replace(**empty)
    got, whole = jax.device_get(sharded(parts, HYPER)), run(batch)
    for name in POLICY:
        for key in ("advantages", "returns", "mask"):
            back = np.zeros_like(whole[name][key])
            back[index[real]] = got[name][key][real]
            np.testing.assert_allclose(back, whole[name][key], rtol=1e-5, atol=1e-5, err_msg=name)
        for key in ("tokens", "rows", "prompts"):
            np.testing.assert_array_equal(got[name]["totals"][key], np.full(SHARDS, whole[name]["totals"][key]))
        np.testing.assert_allclose(got[name]["loss"].sum(), whole[name]["loss"], rtol=1e-4, atol=1e-5, err_msg=name)


@given(seed=seeds)
def test_a_row_without_decisions_or_reward_moves_no_other(seed):
    batch, rng = draw(seed)
    i = rng.integers(B)

    def changed(**fields):
        mask, reward = batch["traj"].mask.copy(), batch["traj"].reward.copy()
        mask[i], reward[i] = fields.get("mask", mask[i]), fields.get("reward", reward[i])
        return run({**batch, "traj": batch["traj"]._replace(mask=mask, reward=reward)})

    empty, missing, absurd = changed(mask=False), changed(mask=False, reward=np.nan), changed(mask=False, reward=1e6)
    jax.tree.map(np.testing.assert_array_equal, empty, missing)
    jax.tree.map(np.testing.assert_array_equal, empty, absurd)
    for name, ready in changed(reward=np.nan).items():
        assert name == "sft" or (ready["advantages"][i] == 0).all(), name
        assert np.isfinite(ready["advantages"]).all() and np.isfinite(ready["returns"]).all() and np.isfinite(ready["loss"])


@given(seed=seeds)
def test_masked_tokens_can_be_deleted(seed):
    """Compaction: trainable tokens moved together, the rest behind them: the same advantages and loss."""
    batch, _ = draw(seed)
    order = np.argsort(~batch["traj"].mask, axis=1, kind="stable")
    move = lambda x: np.take_along_axis(x, order, 1) if x.ndim == 2 and x.shape == (B, T) else x  # noqa: E731
    left, whole = run(jax.tree.map(move, batch)), run(batch)
    for name in TESTED:
        for key in ("advantages", "returns", "mask"):
            np.testing.assert_allclose(left[name][key], move(whole[name][key]), rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(left[name]["loss"], whole[name]["loss"], rtol=1e-5, atol=1e-6, err_msg=name)


def batch_of(mask, reward, group, **fields):
    """A batch of the fixed shape whose first rows and tokens are these; what is left is masked, in no one's group."""
    mask, rows = np.asarray(mask, bool), len(reward)
    wide = lambda x, fill: np.concatenate([x, np.full(B - rows, fill)])  # noqa: E731
    block = np.zeros((B, T), bool)
    block[: mask.shape[0], : mask.shape[1]] = mask
    traj = jax.tree.map(np.asarray, bare_trajectory(
        np.zeros((B, T), np.int32), block, reward=wide(reward, 5.0).astype(np.float32),
        group=wide(group, -7).astype(np.int32), old_logp=np.zeros((B, T), np.float32), length=np.full(B, T, np.int32),
    ))._replace(truncated=np.zeros(B, bool))
    for name, x in fields.items():
        full = getattr(traj, name).copy()
        full[tuple(slice(n) for n in np.shape(x))] = x
        traj = traj._replace(**{name: full})
    zeros = np.zeros((B, T), np.float32)
    rows = {"final_values": zeros[:, 0], "baseline": zeros[:, 0], "anchor": np.zeros((B, T), np.int32)}
    traj = traj._replace(parts=np.stack([traj.reward] * 2, axis=1))
    return {"traj": traj, "logp": zeros, **{k: zeros for k in GIVEN}, **rows}


@given(seed=seeds)
def test_turn_credit(seed):
    """With one turn it is the whole response's; a process reward of the first turn moves no later advantage."""
    batch, _ = draw(seed)
    traj = batch["traj"]
    flat = run({**batch, "traj": traj._replace(turn=np.zeros((B, T), np.int32))})
    np.testing.assert_allclose(flat["turn"]["advantages"], flat["dr_grpo"]["advantages"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(flat["turn_std"]["advantages"], flat["grpo"]["advantages"], rtol=1e-6, atol=1e-6)
    first = traj.mask & (traj.turn == 0)
    before, after = run(batch), run({**batch, "process": np.where(first, np.float32(7), batch["process"])})
    for name in ("turn", "turn_std", "turn_kl"):
        later = [np.where(first, 0, ready[name]["advantages"]) for ready in (before, after)]
        np.testing.assert_allclose(*later, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_turn_is_compared_with_rows_that_reach_it():
    mask = [[1, 1], [1, 1], [1, 1], [1, 0]]
    got = run(batch_of(mask, [1.0, 0, 0, 9], [0] * 4, turn=[[0, 1]] * 4))["turn"]["advantages"][:4, :2]
    np.testing.assert_allclose(got, [[1 - 2.5, 2 / 3], [-2.5, -1 / 3], [-2.5, -1 / 3], [6.5, 0]], rtol=1e-6)


def test_a_critic_learns_nothing_from_a_row_without_reward():
    batch, _ = draw(1)
    traj = batch["traj"]._replace(reward=np.full(B, np.nan, np.float32))
    ready = run({**batch, "traj": traj})["ppo"]
    np.testing.assert_array_equal(ready["returns"], np.where(traj.mask, batch["values"], 0))


def test_the_bootstrap_is_a_switch():
    """0: a truncated row ends with nothing behind it, whatever the critic says there."""
    batch, _ = draw(2)
    batch["traj"] = batch["traj"]._replace(truncated=np.arange(B) % 2 == 0)
    other = {**batch, "final_values": np.arange(B, dtype=np.float32)}
    off = HYPER | {"ppo": HYPER["ppo"] | {"bootstrap": 0.0}}
    for hyper, same in ((off, True), (HYPER, False)):
        one, two = (run(b, hyper)["ppo"]["returns"] for b in ({**batch, "final_values": np.zeros(B, np.float32)}, other))
        assert np.array_equal(one, two) == same


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bfloat16])
def test_rewards_of_any_type_are_numbers(dtype):
    batch, _ = draw(0)
    reward = jnp.asarray([1, 0, 1, 1, 0, 1, 0, 0], dtype)
    prepared = jax.jit(ROWS["grpo"].prepare)(batch["traj"]._replace(reward=reward), process=batch["process"])
    as_float = run({**batch, "traj": batch["traj"]._replace(reward=np.asarray(reward, np.float32))})["grpo"]
    np.testing.assert_allclose(prepared["advantages"], as_float["advantages"], rtol=1e-6, atol=1e-7)


# --- shaping and selection -----------------------------------------------------------------------------------


def test_soft_overlong_is_equation_13():
    length = jnp.arange(0, 24, dtype=jnp.float32)
    expected = [0.0 if n <= 12 else -1.0 if n > 20 else (12 - n) / 8 for n in range(24)]
    np.testing.assert_allclose(shaping.soft_overlong(length, 20.0, 8.0), expected, atol=1e-7)
    np.testing.assert_array_equal(shaping.soft_overlong(length, 20.0, 0.0), [0.0] * 21 + [-1.0] * 3)


def test_groups_without_signal_leave_the_totals():
    """Dynamic sampling. A missing reward, and one of a row that decided nothing, are no signal."""
    mask = np.ones((8, 3), bool)
    mask[7] = False
    ready = run(batch_of(mask, [1.0, 1, 0, 1, np.nan, 1, 1, 0], [0, 0, 1, 1, 2, 2, 3, 3]))
    assert ready["dapo"]["mask"].any(1).tolist() == [False, False, True, True, False, False, False, False]
    for name, totals in (("dapo", (6, 2, 1)), ("grpo", (21, 7, 4))):
        assert tuple(ready[name]["totals"][k] for k in ("tokens", "rows", "prompts")) == totals


def test_the_overlong_filter_is_a_switch():
    batch = batch_of(np.ones((2, 3)), [1.0, 0], [0, 0], truncated=[True, False])
    on, off = (run(batch, HYPER | {"dapo": HYPER["dapo"] | {"overlong_filter": x}})["dapo"] for x in (1.0, 0.0))
    assert on["totals"]["rows"] == 1 and off["totals"]["rows"] == 2
    np.testing.assert_array_equal(on["advantages"][1], off["advantages"][1])  # the filtered row is still in the baseline
    assert (on["advantages"][1, :3] != 0).all()
