"""What every row makes of rewards before its loss, against float64 loops written from the papers; and the laws of
shaping, selection and credit."""

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxpt.objectives import ROWS, shaping
from jaxpt.objectives.algebra import compose
from jaxpt.objectives.parts import Penalty
from jaxpt.types import bare_trajectory

B, T = 8, 7
SHARDS, WIDTH = 4, 4  # shards of whole groups, padded with empty rows to one width
seeds = st.integers(0, 2**31 - 1)
PLAIN = dict(ratio="none", surrogate="score", reduction="sequence_mean")
STD = {"std_eps": 0.0, "ddof": 1.0}
PARTS = {
    "turn": compose("turn", "", advantage="centred", credit="turn", **PLAIN),
    "turn_std": compose("turn_std", "", advantage="standardised", credit="turn", hyper=STD, **PLAIN),
    "token": compose("token", "", advantage="leave_one_out", credit="token", **PLAIN),
    "rloo_kl": compose(
        "rloo_kl", "", advantage="leave_one_out", kl=Penalty("k1", placement="reward"), hyper={"beta": 0.1}, **PLAIN
    ),
    "turn_kl": compose(
        "turn_kl", "", advantage="centred", credit="turn", kl=Penalty("k1", placement="reward"), hyper={"beta": 0.1}, **PLAIN
    ),
    "filtered": compose("filtered", "", advantage="centred", filter="overlong", hyper={"overlong_filter": 1.0}, **PLAIN),
    "selected": compose("selected", "", advantage="centred", selection="signal", hyper={"max_rounds": 2.0}, **PLAIN),
}
TESTED = {**ROWS, **PARTS}
HYPER = {name: dict(row.hyper) for name, row in TESTED.items()}
HYPER["ppo"] |= {"gamma": 0.9, "lam": 0.8, "bootstrap": 1.0, "beta": 0.5}
HYPER["reinforce_plus_plus"] |= {"gamma": 0.95, "beta": 0.3}
for name in ("dapo", "dapo_sequence_mean"):
    HYPER[name] |= {"max_length": 5.0, "buffer": 3.0, "overlong_penalty": 0.7}
GIVEN = ("ref_logp", "values", "final_values", "process")


def share(row, batch, hyper, total=lambda tree: tree):
    """One shard of a batch: what prepare makes of it, and its share of the loss."""
    ready = row.prepare(batch["traj"], **{k: batch[k] for k in GIVEN}, total=total, **hyper)
    extra = {"ref_logp": batch["ref_logp"], "entropy": batch["values"]}
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
    one = lambda batch: {name: share(row, batch, hyper[name], total) for name, row in ROWS.items()}  # noqa: E731
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
    )._replace(turn=turn.astype(np.int32), truncated=rng.random(B) < 0.3)
    batch = {
        "traj": jax.tree.map(np.asarray, traj), "logp": nonsense(logp + rng.normal(0, 0.2, (B, T))),
        "ref_logp": nonsense(logp + rng.normal(0, 0.3, (B, T))), "values": nonsense(rng.normal(size=(B, T))),
        "final_values": np.where(traj.truncated, rng.normal(size=B), np.nan).astype(np.float32),
        "process": nonsense(rng.choice([0.0, 0.25, -0.5], (B, T)) * (rng.random() < 0.7)),
    }
    return batch, rng


# --- the papers as float64 loops -----------------------------------------------------------------------------


def steps_of(batch, name):
    """Per row the decisions as (t, reward of the step): outcome at the last one, process rewards, KL penalty."""
    traj, hyper, out = batch["traj"], HYPER[name], []
    for i in range(B):
        kept = [t for t in range(T) if traj.mask[i, t]]
        row = {t: float(batch["process"][i, t]) for t in kept}
        outcome = float(traj.reward[i])
        if name.startswith("dapo"):  # Yu et al., eq. 13
            length, limit, buffer = len(kept), hyper["max_length"], hyper["buffer"]
            if length > limit:
                outcome -= 0.7
            elif length > limit - buffer:
                outcome += 0.7 * ((limit - buffer) - length) / buffer
        if kept:
            row[kept[-1]] += outcome
        if name in ("ppo", "reinforce_plus_plus", "rloo_kl", "turn_kl"):
            row = {t: r - hyper["beta"] * float(traj.old_logp[i, t] - batch["ref_logp"][i, t]) for t, r in row.items()}
        out.append(row)
    return out


def baselined(kind, mine, others):
    """others: the rewards of the rest of the group."""
    everyone = [mine, *others]
    if kind == "monte_carlo":
        return mine
    if not others or max(everyone) - min(everyone) < 1e-6 * max(map(abs, everyone)):
        return 0.0
    if kind == "leave_one_out":
        return mine - np.mean(others)
    return (mine - np.mean(everyone)) / (np.std(everyone, ddof=1) if kind == "standardised" else 1.0)


KIND = {  # name -> (baseline, credit)
    "reinforce": ("monte_carlo", "row"), "rloo": ("leave_one_out", "row"), "rloo_kl": ("leave_one_out", "row"),
    "dr_grpo": ("centred", "row"), "reinforce_plus_plus_baseline": ("centred", "row"), "filtered": ("centred", "row"),
    "selected": ("centred", "row"), "turn": ("centred", "turn"), "turn_kl": ("centred", "turn"),
    "turn_std": ("standardised", "turn"), "token": ("leave_one_out", "token"),
    **{k: ("standardised", "row") for k in ("grpo", "grpo_no_kl", "dapo", "dapo_sequence_mean", "gspo", "gspo_token")},
}


def place_of(credit, traj, i, t):
    """Which step of its row the decision (i, t) belongs to."""
    return {"row": 0, "turn": int(traj.turn[i, t]), "token": int(traj.mask[i, :t].sum())}[credit]


def advantages_loop(name, batch):
    """[B,T] advantages and, for stepwise rows, returns; before any selection."""
    traj, out, returns = batch["traj"], np.zeros((B, T)), np.zeros((B, T))
    rows, hyper = steps_of(batch, name), HYPER[name]
    if name in ("sft", "raft"):
        return np.where(traj.mask, 1.0, 0.0), returns
    if name in ("ppo", "reinforce_plus_plus"):
        for i, row in enumerate(rows):
            ts = sorted(row)
            value = lambda k: float(batch["values"][i, ts[k]])  # noqa: E731, B023
            if not np.isfinite(sum(row.values())):
                returns[i, ts] = [value(k) for k in range(len(ts))]
                continue
            end = float(batch["final_values"][i]) if traj.truncated[i] else 0.0
            for k, t in enumerate(ts):
                if name == "reinforce_plus_plus":
                    out[i, t] = sum(hyper["gamma"] ** (j - k) * row[ts[j]] for j in range(k, len(ts)))
                    continue
                for j in range(k, len(ts)):  # Schulman et al. 2015, eq. 16
                    ahead = value(j + 1) if j + 1 < len(ts) else end
                    delta = row[ts[j]] + hyper["gamma"] * ahead - value(j)
                    out[i, t] += (hyper["gamma"] * hyper["lam"]) ** (j - k) * delta
                returns[i, t] = out[i, t] + value(k)
        return out, returns
    kind, credit = KIND[name]
    worth = []  # per row: place -> reward from its beginning to the end of the row
    for i, row in enumerate(rows):
        places = {t: place_of(credit, traj, i, t) for t in row}
        worth.append({p: sum(r for t, r in row.items() if places[t] >= p) for p in set(places.values())})
    for i, row in enumerate(rows):
        for t in row:
            p = place_of(credit, traj, i, t)
            same = [worth[j].get(p, np.nan) for j in range(B) if j != i and traj.group[j] == traj.group[i]]
            if np.isfinite(worth[i][p]):
                out[i, t] = baselined(kind, worth[i][p], [x for x in same if np.isfinite(x)])
    return out, returns


def loop(name, batch):
    traj = batch["traj"]
    with np.errstate(invalid="ignore"):
        advantages, returns = advantages_loop(name, batch)
    keep = traj.mask.copy()
    for i in range(B):
        rewards = {float(traj.reward[j]) for j in range(B) if traj.group[j] == traj.group[i] and traj.mask[j].any()}
        if name.startswith("dapo") or name == "selected":
            keep[i] &= len({r for r in rewards if np.isfinite(r)}) > 1
        if name.startswith("dapo") or name == "filtered":
            keep[i] &= not traj.truncated[i]
        if name == "raft":
            keep[i] &= np.isfinite(traj.reward[i]) and traj.reward[i] > 0
    if name in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        scored = [np.isfinite(sum(row.values())) for row in steps_of(batch, name)]
        chosen = keep & np.array(scored)[:, None]
        x = advantages[chosen]
        spread = x.std() if len(x) and x.std() > 1e-5 * np.abs(x).max() else np.inf
        advantages = np.where(chosen, (advantages - (x.mean() if len(x) else 0)) / spread, 0)
    return {
        "advantages": np.where(keep, advantages, 0), "returns": np.where(keep, returns, 0), "mask": keep,
        "totals": {"tokens": keep.sum(), "rows": keep.any(1).sum()},
    }


@given(seed=seeds)
def test_against_float64_loops(seed):
    batch, _ = draw(seed)
    for name, got in run(batch).items():
        want = loop(name, batch)
        np.testing.assert_array_equal(got["mask"], want["mask"], err_msg=name)
        assert got["totals"] == want["totals"]
        np.testing.assert_allclose(got["advantages"], want["advantages"], rtol=1e-3, atol=2e-5, err_msg=name)
        if name == "ppo":
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
    for name in ROWS:
        for key in ("advantages", "returns", "mask"):
            back = np.zeros_like(whole[name][key])
            back[index[real]] = got[name][key][real]
            np.testing.assert_allclose(back, whole[name][key], rtol=1e-5, atol=1e-5, err_msg=name)
        for key, total in whole[name]["totals"].items():
            np.testing.assert_array_equal(got[name]["totals"][key], np.full(SHARDS, total))
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
    return {"traj": traj, "logp": zeros, "final_values": zeros[:, 0], **{k: zeros for k in GIVEN if k != "final_values"}}


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
    assert ready["dapo"]["totals"] == {"tokens": 6, "rows": 2} and ready["grpo"]["totals"] == {"tokens": 21, "rows": 7}


def test_the_overlong_filter_is_a_switch():
    batch = batch_of(np.ones((2, 3)), [1.0, 0], [0, 0], truncated=[True, False])
    on, off = (run(batch, HYPER | {"dapo": HYPER["dapo"] | {"overlong_filter": x}})["dapo"] for x in (1.0, 0.0))
    assert on["totals"]["rows"] == 1 and off["totals"]["rows"] == 2
    np.testing.assert_array_equal(on["advantages"][1], off["advantages"][1])  # the filtered row is still in the baseline
    assert (on["advantages"][1, :3] != 0).all()
