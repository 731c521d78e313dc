"""What every row makes of rewards before its loss, as float64 loops written from the papers."""

import jax
import numpy as np
from advantage_loops import advantage

from jaxpt.objectives import ROWS
from jaxpt.objectives.algebra import compose
from jaxpt.objectives.parts import ADVANTAGES, Penalty
from jaxpt.objectives.probe import policy_batch

B, T = 8, 7
PLAIN = dict(ratio="none", surrogate="score", reduction="sequence_mean")
STD = {"std_eps": 0.0, "ddof": 1.0}
PARTS = {
    "turn": compose("turn", "", advantage="centred", credit="turn", **PLAIN),
    "turn_std": compose("turn_std", "", advantage="standardised", credit="turn", hyper=STD, **PLAIN),
    "token": compose("token", "", advantage="leave_one_out", credit="token", **PLAIN),
    "channels": compose("channels", "", advantage="centred", credit="channels", hyper={"path_weight": 0.5}, **PLAIN),
    "turn_kl": compose(
        "turn_kl", "", advantage="centred", credit="turn", kl=Penalty("k1", placement="reward"), hyper={"beta": 0.1}, **PLAIN
    ),
    "filtered": compose("filtered", "", advantage="centred", filter="overlong", hyper={"overlong_filter": 1.0}, **PLAIN),
    "selected": compose("selected", "", advantage="centred", selection="signal", hyper={"max_rounds": 2.0}, **PLAIN),
}


def distinct(rows):
    """One row of those that prepare alike: the traced programs, constants included, are the same to the letter."""
    traj, stats = policy_batch()
    given = {k: stats[k] for k in ("ref_logp", "values", "baseline", "anchor", "sampler_logp")}
    first = {}
    for name, row in rows.items():
        first.setdefault(str(jax.make_jaxpr(lambda traj, given, row=row: row.prepare(traj, **given))(traj, given)), name)
    return {name: rows[name] for name in first.values()}


POLICY = distinct({  # opd reads no reward
    name: row for name, row in ROWS.items() if row.family == "policy_loss" and "." not in name and name != "opd"
})
TESTED = {**POLICY, **PARTS}
HYPER = {name: dict(row.hyper) for name, row in TESTED.items()}
HYPER["ppo"] |= {"gamma": 0.9, "lam": 0.8, "bootstrap": 1.0, "beta": 0.5}
HYPER["a2c"] |= {"gamma": 0.9, "n_steps": 2.0, "bootstrap": 1.0}
HYPER["impala"] |= {"gamma": 0.9, "rho_bar": 1.1, "c_bar": 0.8}
HYPER["gigpo"] |= {"gamma": 0.8, "step_weight": 0.7}
HYPER["rloo_kl"]["beta"] = 0.1
HYPER["reinforce_plus_plus"] |= {"gamma": 0.95, "beta": 0.3}
OVERLONG = [name for name, row in TESTED.items() if "overlong_penalty" in row.hyper]
for name in OVERLONG:
    HYPER[name] |= {"max_length": 5.0, "buffer": 3.0, "overlong_penalty": 0.7}


def steps_of(batch, name):
    """Per row the decisions as (t, reward of the step): outcome at the last one, process rewards, KL penalty."""
    traj, hyper, out = batch["traj"], HYPER[name], []
    for i in range(B):
        kept = [t for t in range(T) if traj.mask[i, t]]
        rewarded = name != "opd"  # which knows the teacher alone
        row = {t: float(batch["process"][i, t]) if rewarded else 0.0 for t in kept}
        outcome = float(traj.reward[i]) if rewarded else 0.0
        if name in OVERLONG:  # Yu et al., eq. 13
            length, limit, buffer = len(kept), hyper["max_length"], hyper["buffer"]
            if length > limit:
                outcome -= 0.7
            elif length > limit - buffer:
                outcome += 0.7 * ((limit - buffer) - length) / buffer
        if kept:
            row[kept[-1]] += outcome
        if TESTED[name].parts.get("kl_placement") == "taken from the reward of its token":
            row = {t: r - hyper["beta"] * float(traj.old_logp[i, t] - batch["ref_logp"][i, t]) for t, r in row.items()}
        if name == "maxent":
            row = {t: r - hyper["entropy_coef"] * float(traj.old_logp[i, t]) for t, r in row.items()}
        out.append(row)
    return out


KIND = {  # name -> (advantage, credit); of the other rows, the advantage that they name and the row's credit
    "reinforce": ("monte_carlo", "row"), "rloo": ("leave_one_out", "row"), "rloo_kl": ("leave_one_out", "row"),
    "dr_grpo": ("centred", "row"), "reinforce_plus_plus_baseline": ("centred", "row"), "filtered": ("centred", "row"),
    "selected": ("centred", "row"), "turn": ("centred", "turn"), "turn_kl": ("centred", "turn"),
    "turn_std": ("standardised", "turn"), "token": ("leave_one_out", "token"),
    **{k: ("standardised", "row") for k in ("grpo", "grpo_no_kl", "dapo", "dapo_sequence_mean", "gspo", "gspo_token")},
    "reinforce_baseline": ("monte_carlo", "row"), "remax": ("above_baseline", "row"), "opo": ("less_length_weighted", "row"),
    "gpg": ("centred", "row"), "maxrl": ("over_mean", "row"), "pkpo": ("best_of_k", "row"),
    "pass_at_k": ("pass_at_k", "row"),
    "grpo_batch_std": ("centred", "row"), "lite_ppo": ("centred", "row"), "gdpo": ("standardised_parts", "row"),
    "awr": ("exponential", "row"),
}
NAMED = {part.words: name for name, part in ADVANTAGES.items()}


def place_of(credit, traj, i, t):
    """Which step of its row the decision (i, t) belongs to."""
    return {"row": 0, "turn": int(traj.turn[i, t]), "token": int(traj.mask[i, :t].sum())}[credit]


def advantages_loop(name, batch):
    """[B,T] advantages and, for stepwise rows, returns; before any selection."""
    traj, out, returns = batch["traj"], np.zeros((B, T)), np.zeros((B, T))
    rows, hyper = steps_of(batch, name), HYPER[name]
    if name in ("sft", "raft"):
        return np.where(traj.mask, 1.0, 0.0), returns
    if name in STEPPED:
        for i, row in enumerate(rows):
            ts = sorted(row)
            value = lambda k: float(batch["values"][i, ts[k]])  # noqa: E731, B023
            if not np.isfinite(sum(row.values())):
                returns[i, ts] = [value(k) for k in range(len(ts))]
                continue
            end = hyper.get("bootstrap", 0) * float(batch["final_values"][i]) if traj.truncated[i] else 0.0
            ahead = lambda k, ts=ts, end=end, value=value: value(k) if k < len(ts) else end  # noqa: E731
            if name == "impala":  # Espeholt et al. 2018, eq. 1, summed out
                x = [float(np.exp(traj.old_logp[i, t] - batch["sampler_logp"][i, t])) for t in ts]
                rho, c = ([min(bound, y) for y in x] for bound in (1.1, 0.8))
                delta = [rho[k] * (row[t] + 0.9 * ahead(k + 1) - value(k)) for k, t in enumerate(ts)]
                target = [
                    ahead(k) + sum(0.9 ** (j - k) * np.prod(c[k:j]) * delta[j] for j in range(k, len(ts)))
                    for k in range(len(ts) + 1)
                ]
                returns[i, ts] = target[:-1]
                out[i, ts] = [rho[k] * (row[t] + 0.9 * target[k + 1] - value(k)) for k, t in enumerate(ts)]
                continue
            for k, t in enumerate(ts):
                if name in ("reinforce_plus_plus", "opd"):
                    out[i, t] = sum(hyper["gamma"] ** (j - k) * row[ts[j]] for j in range(k, len(ts)))
                    continue
                if name == "a2c":  # Mnih et al. 2016: n steps, then the critic
                    stop = min(k + 2, len(ts))
                    out[i, t] = sum(0.9 ** (j - k) * row[ts[j]] for j in range(k, stop)) + 0.9 ** (stop - k) * ahead(stop)
                    out[i, t] -= value(k)
                for j in range(k, len(ts) if name != "a2c" else k):  # Schulman et al. 2015, eq. 16
                    delta = row[ts[j]] + hyper["gamma"] * ahead(j + 1) - value(j)
                    out[i, t] += (hyper["gamma"] * hyper["lam"]) ** (j - k) * delta
                returns[i, t] = out[i, t] + value(k)
        return out, returns
    return STEPS.get(name, plain)(name, batch, rows, hyper), returns


def plain(name, batch, rows, hyper):
    """One advantage a slot, among the same slots of the group's rows."""
    traj, out = batch["traj"], np.zeros((B, T))
    kind, credit = KIND.get(name) or (NAMED[TESTED[name].parts["advantage"]], "row")
    constants = {k: hyper[k] for k in ADVANTAGES[kind].uses}
    known = [{"length": len(row), "baseline": batch["baseline"][i], "parts": traj.parts[i]} for i, row in enumerate(rows)]
    worth = []  # per row: place -> reward from its beginning to the end of the row
    for i, row in enumerate(rows):
        places = {t: place_of(credit, traj, i, t) for t in row}
        worth.append({p: sum(r for t, r in row.items() if places[t] >= p) for p in set(places.values())})
    for i, row in enumerate(rows):
        for t in row:
            p = place_of(credit, traj, i, t)
            same = [(j, worth[j].get(p, np.nan)) for j in range(B) if j != i and traj.group[j] == traj.group[i]]
            if np.isfinite(worth[i][p]):
                others = [known[j] | {"r": x} for j, x in same if np.isfinite(x)]
                out[i, t] = advantage(kind, known[i] | {"r": worth[i][p]}, others, **constants)
    return out


def turns_of(traj, row, i):
    """turn -> (reward within it, its tokens)"""
    out = {}
    for t, r in row.items():
        reward, tokens = out.get(int(traj.turn[i, t]), (0.0, []))
        out[int(traj.turn[i, t])] = reward + r, [*tokens, t]
    return out


def among(kind, values, label, **constants):
    """Advantages of all finite values [(key, value)], each among those of one label(key)."""
    finite = {key: x for key, x in values if np.isfinite(x)}
    rest = lambda key: [{"r": x} for other, x in finite.items() if other != key and label(other) == label(key)]  # noqa: E731
    return {key: advantage(kind, {"r": x}, rest(key), **constants) for key, x in finite.items()}


def process_supervision(name, batch, rows, hyper):
    """Shao et al. 2024, section 4.1.3: rewards of all steps of the group standardised together, then summed from the
    own step on."""
    traj, out = batch["traj"], np.zeros((B, T))
    turns = [turns_of(traj, row, i) for i, row in enumerate(rows)]
    scored = [i for i, of in enumerate(turns) if np.isfinite(sum(r for r, _ in of.values()))]
    steps = [((i, u), r) for i in scored for u, (r, _) in turns[i].items()]
    made = among("standardised", steps, lambda key: traj.group[key[0]], **STD)
    for i, u in made:
        out[i, turns[i][u][1]] = sum(a for (j, v), a in made.items() if j == i and v >= u)
    return out


def anchors(name, batch, rows, hyper):
    """Feng et al. 2025, section 4: the episode's advantage plus step_weight times that of the turn among turns of the
    group that begin in the same state."""
    traj, out = batch["traj"], np.zeros((B, T))
    turns = [turns_of(traj, row, i) for i, row in enumerate(rows)]
    episodes = among("standardised", [(i, sum(row.values())) for i, row in enumerate(rows) if row], lambda i: traj.group[i],
                     **STD)
    rest = lambda of, u: sum(hyper["gamma"] ** (v - u) * r for v, (r, _) in of.items() if v >= u)  # noqa: E731
    to_go = [((i, u), rest(of, u)) for i, of in enumerate(turns) for u in of]
    state = lambda key: (traj.group[key[0]], batch["anchor"][key[0], turns[key[0]][key[1]][1][0]])  # noqa: E731
    for (i, u), a in among("standardised", to_go, state, **STD).items():
        out[i, turns[i][u][1]] = hyper["step_weight"] * a
    for i, a in episodes.items():
        out[i] += np.where(traj.mask[i], a, 0)
    return out


def two_channels(name, batch, rows, hyper):
    """The outcome's advantage, and verified rewards at their turn, scaled up to a mean over their own tokens."""
    traj, path = batch["traj"], np.zeros((B, T))
    outcomes = [(i, float(traj.reward[i])) for i, row in enumerate(rows) if row]
    out = np.zeros((B, T))
    for i, a in among("centred", outcomes, lambda i: traj.group[i]).items():
        out[i] = np.where(traj.mask[i], a, 0)
        for _, tokens in turns_of(traj, rows[i], i).values():
            path[i, tokens] = sum(float(batch["process"][i, t]) for t in tokens)
    return out + hyper["path_weight"] * path * traj.mask.sum() / max((path != 0).sum(), 1)


STEPPED = [name for name, row in TESTED.items() if row.parts["credit"] == "every decision is a step of its own"]
STEPS = {"grpo_process": process_supervision, "gigpo": anchors, "channels": two_channels}


def loop(name, batch):
    traj = batch["traj"]
    advantages, returns = advantages_loop(name, batch)
    keep = traj.mask.copy()
    for i in range(B):
        rewards = {float(traj.reward[j]) for j in range(B) if traj.group[j] == traj.group[i] and traj.mask[j].any()}
        if "max_rounds" in TESTED[name].hyper:
            keep[i] &= len({r for r in rewards if np.isfinite(r)}) > 1
        if "overlong_filter" in TESTED[name].hyper:
            keep[i] &= not traj.truncated[i]
        if name == "raft":
            keep[i] &= np.isfinite(traj.reward[i]) and traj.reward[i] > 0
    rewards = np.array([sum(row.values()) for row in steps_of(batch, name)])
    chosen = keep & np.isfinite(rewards)[:, None]
    of_row, counted = rewards[chosen.any(1)], chosen.any(1)
    varies = len(of_row) > 1 and np.ptp(of_row) > 1e-6 * np.abs(of_row).max()
    if name == "reinforce_baseline":
        advantages = np.where(chosen, advantages - (of_row.mean() if len(of_row) else 0), 0)
    if name in ("grpo_batch_std", "lite_ppo"):
        advantages = np.where(chosen, advantages / np.std(of_row, ddof=1), 0) if varies else 0 * advantages
    if name == "gpg":
        alive = [i for i in np.flatnonzero(counted) if np.ptp(rewards[counted & (traj.group == traj.group[i])]) > 1e-6]
        advantages = np.where(chosen, advantages * counted.sum() / max(len(alive), 1), 0)
    if name == "gdpo":
        x = np.array([advantages[i, chosen[i]][0] for i in np.flatnonzero(counted)])
        spread = x.std() if len(x) and x.std() > 1e-5 * np.abs(x).max() else np.inf
        advantages = np.where(chosen, (advantages - (x.mean() if len(x) else 0)) / spread, 0)
    if TESTED[name].parts["normalisation"] == "whitened over the whole batch":
        x = advantages[chosen]
        spread = x.std() if len(x) and x.std() > 1e-5 * np.abs(x).max() else np.inf
        advantages = np.where(chosen, (advantages - (x.mean() if len(x) else 0)) / spread, 0)
    return {
        "advantages": np.where(keep, advantages, 0), "returns": np.where(keep, returns, 0), "mask": keep,
        "totals": {"tokens": keep.sum(), "rows": keep.any(1).sum(), "prompts": len(set(traj.group[keep.any(1)].tolist()))},
    }
