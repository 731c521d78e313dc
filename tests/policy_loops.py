"""The losses of the policy objectives as float64 loops written from the papers: name -> (reduction, loss of a token).

A token x has l, o, f, b, h, v, a, u (logp, old, reference, sampler, entropy, KL over the vocabulary, advantage, given
weight) and g (prompt); what a
gradient is stopped at, l0 and h0; of its row s, s0 (mean of l - o, of l0 - o), bs, bm (sum and mean of o - b) and gm
(mean of GMPO's clipped log-ratios); of the batch c (covariance of a and l0) and the choices clip_cov, kl_cov and top.
"""

import math

import numpy as np

GSPO_CLIP = (0.05, 0.1)
HYPER = {  # constants under which every branch of a formula is met by the batches of the tests
    "ppo": {"entropy_coef": 0.3}, "a2c": {"entropy_coef": 0.3}, "dr_grpo": {"max_length": 7.0},
    **dict.fromkeys(("gspo", "gspo_token"), dict(zip(("eps_low", "eps_high"), GSPO_CLIP, strict=True))),
    "cispo": {"eps_low": 0.15, "eps_high": 0.1}, "sapo": {"tau_pos": 1.5, "tau_neg": 0.7},
    "gmpo": {"log_low": 0.2, "log_high": 0.1}, "ppo_dual_clip": {"dual_clip": 1.15},
    "clip_cov": {"cov_share": 0.2, "cov_low": 0.05, "cov_high": 0.6}, "kl_cov": {"cov_share": 0.25, "old_coef": 0.7},
    "dppo_tv": {"tv_low": 0.04, "tv_high": 0.08, "ratio_cap": 1.2},
    "dppo_kl": {"kl_low": 0.005, "kl_high": 0.01, "ratio_cap": 1.2},
    "dppo_tv_symmetric": {"tv_low": 0.04, "tv_high": 0.08, "old_coef": 0.3},
    "magic": {"entropy_coef": 0.2, "entropy_target": 0.5, "entropy_last": 0.4},
    "top_entropy": {"entropy_share": 0.3},
    "grpo_tis": {"is_high": 1.1}, "icepop": {"is_low": 0.8, "is_high": 1.3},
    **dict.fromkeys(("grpo_sequence_tis", "grpo_sequence_mis"), {"is_high": 1.2}),
    "grpo_geometric_mask": {"is_low": 0.9, "is_high": 1.15}, "grpo_opsm": {"drift_max": 0.05}, "impala": {"entropy_coef": 0.3},
}


def clip(x, r, low, high):
    return -min(r * x["a"], min(max(r, 1 - low), 1 + high) * x["a"])


def ratio(x):
    return math.exp(x["l"] - x["o"])


def ppo(x, low=0.2, high=0.2):
    return clip(x, ratio(x), low, high)


def reinforce(x):
    return -x["a"] * x["l"]


def k_1(x):
    return x["l"] - x["f"]


def k_3(x):
    return math.exp(x["f"] - x["l"]) - 1 - (x["f"] - x["l"])


def forward_kl(x):
    r = math.exp(x["f"] - x["l"])
    return r * math.log(r) - (r - 1)


def jensen_shannon(x):
    r = math.exp(x["f"] - x["l"])
    m = (1 + r) / 2
    return -math.log(m) / 2 + r * math.log(r / m) / 2


def alpha_divergence(x, alpha=0.3):
    r = math.exp(x["f"] - x["l"])
    return (alpha * r + 1 - alpha - r**alpha) / (alpha * (1 - alpha))


def held(value, weight):
    """value at the point where the gradient was stopped, moving with logp by `weight` there."""
    return lambda x: value({**x, "l": x["l0"]}) + weight({**x, "l": x["l0"]}) * (x["l"] - x["l0"])


def with_kl(loss, k, beta=0.5):
    return lambda x: loss(x) + beta * k(x)


def cispo(x):
    return min(max(math.exp(x["l0"] - x["o"]), 1 - 0.15), 1 + 0.1) * reinforce(x)


def sapo(x):
    tau = 1.5 if x["a"] > 0 else 0.7
    return -4 / tau / (1 + math.exp(-tau * (ratio(x) - 1))) * x["a"]


def dual_clip(x):
    return min(ppo(x), -1.15 * x["a"]) if x["a"] < 0 else ppo(x)


def moved(x):
    return min(math.exp(x["l0"]), 1) - min(math.exp(x["o"]), 1)


def bernoulli_kl(x):
    q, p = (min(math.exp(x[k]), 1) for k in ("o", "l0"))
    return q * (math.log(q) - math.log(p)) + (1 - q) * (math.log(max(1 - q, 1e-12)) - math.log(max(1 - p, 1e-12)))


def outside_tv(x):
    return moved(x) > 0.08 if x["a"] > 0 else moved(x) < -0.04


def outside_kl(x):
    far = bernoulli_kl(x) > (0.01 if x["a"] > 0 else 0.005)
    return far and (moved(x) > 0 if x["a"] > 0 else moved(x) < 0)


def outside_both(x):
    return not -0.04 <= moved(x) <= 0.08


def trusted(outside):
    return lambda x: 0.0 if outside(x) else min(math.exp(x["l0"] - x["o"]), 1.2) * reinforce(x)


def symmetric(x):
    return -ratio(x) * x["a"] * (not outside_both(x)) + 0.3 * (x["l"] - x["o"]) ** 2


def opsm(x):
    return 0.0 if x["a"] < 0 and -x["s0"] > 0.05 else ppo(x)


def kl_cov(x):
    return -ratio(x) * x["a"] + (0.7 * abs(x["l"] - x["o"]) if x["kl_cov"] else 0)


def entropy_shaped(x):
    return ppo({**x, "a": x["a"] + min(0.4 * x["h0"], abs(x["a"]) / 2)})


def weighed(weight, loss=ppo):
    return lambda x: weight(x) * loss(x)


def inside(w, low, high):
    return w if low <= w <= high else 0.0


def token_weight(x):
    return math.exp(x["o"] - x["b"])


def by_tokens(rows, f):
    return sum(f(x) for row in rows for x in row) / sum(map(len, rows))


def by_rows(rows, f):
    return sum(sum(f(x) for x in row) / len(row) for row in rows) / len(rows)


def by_sum(rows, f):
    return sum(f(x) for row in rows for x in row) / len(rows)


def by_nothing(rows, f):
    return sum(f(x) for row in rows for x in row)


def by_prompts(rows, f):
    prompts = [[x for row in rows if row[0]["g"] == g for x in row] for g in {row[0]["g"] for row in rows}]
    return sum(sum(map(f, tokens)) / len(tokens) for tokens in prompts) / len(prompts)


def of_budget(rows, f):
    return by_sum(rows, f) / 7


def dapo(x):
    return ppo(x, 0.2, 0.28)


PAPER = {
    **dict.fromkeys(("sft", "raft", "gpg", "awr", "opd"), (by_tokens, reinforce)),
    **dict.fromkeys(
        ("reinforce", "rloo", "reinforce_baseline", "rloo_kl", "remax", "opo", "maxrl", "pkpo", "maxent"), (by_sum, reinforce)
    ),
    **dict.fromkeys(("reinforce_plus_plus", "lite_ppo"), (by_tokens, ppo)),
    **dict.fromkeys(("grpo_no_kl", "grpo_batch_std", "gdpo"), (by_rows, ppo)),
    **dict.fromkeys(("grpo", "grpo_process"), (by_rows, with_kl(ppo, k_3, 0.04))),
    **dict.fromkeys(("dapo", "pass_at_k"), (by_tokens, dapo)),
    "reinforce_plus_plus_baseline": (by_tokens, lambda x: ppo(x) + 0.01 * k_1(x) ** 2 / 2),
    "ppo": (by_tokens, lambda x: ppo(x) - 0.3 * x["h"]),
    **dict.fromkeys(("a2c", "impala"), (by_tokens, lambda x: reinforce(x) - 0.3 * x["h"])),
    "gigpo": (by_tokens, with_kl(ppo, k_3, 0.01)),
    "dr_grpo": (of_budget, ppo),
    "dapo_sequence_mean": (by_rows, dapo),
    "dapo_prompt_mean": (by_prompts, dapo),
    "gspo": (by_rows, lambda x: clip(x, math.exp(x["s"]), *GSPO_CLIP)),
    "gspo_token": (by_rows, lambda x: clip(x, math.exp(x["s0"] + x["l"] - x["l0"]), *GSPO_CLIP)),
    "cispo": (by_tokens, cispo),
    "sapo": (by_rows, sapo),
    "gmpo": (by_rows, lambda x: -x["a"] * math.exp(x["gm"])),
    "ppo_dual_clip": (by_tokens, dual_clip),
    "clip_cov": (by_tokens, lambda x: 0.0 if x["clip_cov"] else ppo(x)),
    "kl_cov": (by_tokens, kl_cov),
    "dppo_tv": (by_tokens, trusted(outside_tv)),
    "dppo_kl": (by_tokens, trusted(outside_kl)),
    "dppo_tv_symmetric": (by_tokens, symmetric),
    "grpo_unbiased_kl": (by_rows, lambda x: ppo(x) + 0.04 * ratio(x) * k_3(x)),
    "grpo_vocab_kl": (by_rows, lambda x: ppo(x) + 0.04 * x["v"]),
    "grpo_opsm": (by_rows, opsm),
    "magic": (by_tokens, lambda x: ppo(x) - 0.2 * x["h"]),
    "top_entropy": (by_tokens, weighed(lambda x: x["top"], dapo)),
    "entropy_advantage": (by_rows, entropy_shaped),
    "grpo_token_weights": (by_rows, weighed(lambda x: x["u"])),
    "grpo_tis": (by_rows, weighed(lambda x: min(token_weight(x), 1.1))),
    "icepop": (by_rows, weighed(lambda x: inside(token_weight(x), 0.8, 1.3))),
    "grpo_sequence_tis": (by_rows, weighed(lambda x: min(math.exp(x["bs"]), 1.2))),
    "grpo_sequence_mis": (by_rows, weighed(lambda x: inside(math.exp(x["bs"]), 0, 1.2))),
    "grpo_geometric_mask": (by_rows, weighed(lambda x: 0.9 <= math.exp(x["bm"]) <= 1.15)),
    # parts that no row has
    "k1_loss": (by_tokens, with_kl(reinforce, k_1)),
    "k1_pulls_as_k2": (by_tokens, with_kl(reinforce, held(k_1, k_1))),
    "k3_pulls_as_k2": (by_tokens, with_kl(reinforce, held(k_3, k_1))),
    "k3_score": (by_tokens, with_kl(reinforce, held(k_3, lambda x: ratio(x) * k_1(x)))),
    "k1_importance": (by_tokens, with_kl(reinforce, lambda x: ratio(x) * k_1(x))),
    "abs": (by_tokens, with_kl(reinforce, lambda x: abs(k_1(x)))),
    "forward": (by_tokens, with_kl(reinforce, forward_kl)),
    "alpha": (by_tokens, with_kl(reinforce, alpha_divergence)),
    "jensen_shannon": (by_tokens, with_kl(reinforce, jensen_shannon)),
    "summed": (by_nothing, reinforce),
    "tis_with_kl": (by_tokens, with_kl(weighed(lambda x: min(token_weight(x), 1.1), reinforce), lambda x: k_1(x) ** 2 / 2)),
}
BINDS = {  # where a bound binds, for rows that do not clip as PPO
    "cispo": lambda x: not 1 - 0.15 <= ratio(x) <= 1 + 0.1,
    "gmpo": lambda x: x["l"] - x["o"] > 0.1 if x["a"] > 0 else x["a"] < 0 and x["l"] - x["o"] < -0.2,
    "ppo_dual_clip": lambda x: x["a"] * (ratio(x) - 1) > 0.2 * abs(x["a"]) or x["a"] < 0 and ratio(x) > 1.15,
    "grpo_opsm": lambda x: x["a"] < 0 and -x["s0"] > 0.05 or x["a"] * (ratio(x) - 1) > 0.2 * abs(x["a"]),
    "clip_cov": lambda x: x["clip_cov"] or x["a"] * (ratio(x) - 1) > 0.2 * abs(x["a"]),
    "dppo_tv": outside_tv, "dppo_kl": outside_kl, "dppo_tv_symmetric": outside_both,
}
NAMES = {
    "l": "logp", "o": "old_logp", "f": "ref_logp", "b": "sampler_logp", "h": "entropy", "v": "vocab_kl", "a": "advantages",
    "u": "weights",
}


def tokens_of(batch, at=None):
    """Rows of tokens; what is held where a gradient is stopped is taken from the batch `at`."""
    at, rows = batch if at is None else at, []
    for i, kept in enumerate(batch["mask"]):
        row = [{k: float(batch[v][i, t]) for k, v in NAMES.items()} | {"at": (i, t)} for t in np.flatnonzero(kept)]
        for x in row:
            x |= {"l0": float(at["logp"][x["at"]]), "h0": float(at["entropy"][x["at"]]), "g": int(batch["group"][i])}
        if row:
            signs = [(np.sign(x["a"]), x["l"] - x["o"]) for x in row]
            of_row = {
                "s": np.mean([x["l"] - x["o"] for x in row]), "s0": np.mean([x["l0"] - x["o"] for x in row]),
                "bs": sum(x["o"] - x["b"] for x in row), "bm": np.mean([x["o"] - x["b"] for x in row]),
                "gm": np.mean([sign * min(sign * d, sign * min(max(d, -0.2), 0.1)) for sign, d in signs]),
            }
            rows.append([x | of_row for x in row])
    everything = [x for row in rows for x in row]
    choose(everything)
    return rows


def choose(tokens):
    if not tokens:
        return
    mean_a, mean_l = (np.mean([x[k] for x in tokens]) for k in ("a", "l0"))
    for x in tokens:
        x["c"] = (x["a"] - mean_a) * (x["l0"] - mean_l) if abs(x["a"] - mean_a) > 1e-5 else 0.0
    free = lambda x: x["a"] * (math.exp(x["l0"] - x["o"]) - 1) <= 0.2 * abs(x["a"])  # noqa: E731
    for name, share, key, there in (
        ("kl_cov", 0.25, "c", lambda x: x["c"] > 0), ("clip_cov", 0.2, "c", lambda x: 0.05 < x["c"] < 0.6 and free(x)),
        ("top", 0.3, "h0", lambda x: True),
    ):
        ranked = sorted((x for x in tokens if there(x)), key=lambda x: -x[key])
        for rank, x in enumerate(ranked):
            x[name] = rank < math.ceil(share * len(tokens) - 1e-6)
        for x in tokens:
            x.setdefault(name, False)


def losses(names, batch, at=None):
    """{name: loss of the batch}, gradients stopped at the batch `at`."""
    rows = tokens_of(batch, at)
    return {name: PAPER[name][0](rows, PAPER[name][1]) if rows else 0.0 for name in names}
