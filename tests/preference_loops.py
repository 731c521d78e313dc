"""The losses of the preference objectives as float64 loops written from the papers, and what they are tried on.

A pair x has zc, zr (sums of log-ratios), lc, lr (sums of logp), mc, mr (their means), nc, nr (lengths), hc, hr (log-ratios
of the length both have) and w, u (the weights of WPO, aligned or not); h are the constants of its row.
"""

import numpy as np

from jaxpt.objectives import preference, unpaired
from jaxpt.objectives.preference_algebra import compose

B, T = 6, 6
PARTS = {  # parts that no row of the tables has
    "nll_tokens": compose("nll_tokens", "", link="logistic", term="nll_tokens", hyper={"beta": 0.5, "nll_coef": 0.3}),
    "apo_unpaired": unpaired.compose(
        "apo_unpaired", "", point="none", link="prospect", reduction="rows",
        hyper={"beta": 0.5, "desirable_weight": 0.7, "undesirable_weight": 1.2},
    ),
}
ROWS = {row.name: row for row in (*preference.ROWS, *unpaired.ROWS, *PARTS.values())}
PAIRED = [name for name, row in ROWS.items() if row.family == "preference"]
QUANTILES = ["aot", "aot_unpaired"]
HYPER = {name: dict(row.hyper) for name, row in ROWS.items()}
for name, changed in {  # where the default hides what the constant does
    "wpo": {"beta": 0.4}, "wpo_unaligned": {"beta": 0.4}, "sppo": {"eta": 3.0}, "nca": {"beta": 0.5},
    "bco_pair": {"beta": 0.5}, "bco": {"beta": 0.5}, "aot": {"label_smoothing": 0.2}, "aot_unpaired": {"label_smoothing": 0.2},
    "ipo": {"tau": 0.7}, "ipo_sum": {"tau": 0.7}, "discopop": {"beta": 0.4, "tau": 0.5}, "dpop": {"lam": 3.0},
    "exo": {"label_smoothing": 0.1}, "rso_hinge": {"beta": 0.4}, "kto": {"beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.8},
}.items():
    HYPER[name] |= changed
VALUES = [f"{side}_{what}" for side in ("chosen", "rejected") for what in ("logp", "collision")]
VALUES += ["ref_chosen_logp", "ref_rejected_logp"]


def logsig(v):
    return -np.logaddexp(0, -v)


def sig(v):
    return 1 / (1 + np.exp(-v))


def odds(mean):
    return mean - np.log(1 - np.exp(mean))


def smoothed(v, e):
    return -(1 - e) * logsig(v) - e * logsig(-v)


def exo(x, h):
    q, p = sig(h["beta"] * (x["zc"] - x["zr"])), 1 - h["label_smoothing"]
    return q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))


def discopop(x, h):
    rho = h["beta"] * (x["zc"] - x["zr"])
    return (1 - sig(rho / h["tau"])) * -logsig(rho) + sig(rho / h["tau"]) * np.exp(-rho)


def dpo(x, h):
    return -logsig(h["beta"] * (x["zc"] - x["zr"]))


PAPER = {
    "dpo": dpo,
    "dpo_norm": lambda x, h: -logsig(h["beta"] * x["zc"] / x["nc"] - h["beta"] * x["zr"] / x["nr"]),
    "cdpo": lambda x, h: smoothed(h["beta"] * (x["zc"] - x["zr"]), h["label_smoothing"]),
    "robust_dpo": lambda x, h: (
        (1 - h["label_smoothing"]) * dpo(x, h) - h["label_smoothing"] * dpo({"zc": x["zr"], "zr": x["zc"]}, h)
    ) / (1 - 2 * h["label_smoothing"]),
    "fdpo_forward_kl": lambda x, h: -logsig(h["beta"] * (-np.exp(-x["zc"]) + np.exp(-x["zr"]))),
    "fdpo_js": lambda x, h: -logsig(
        h["beta"] * np.log(2 * np.exp(x["zc"]) / (1 + np.exp(x["zc"])))
        - h["beta"] * np.log(2 * np.exp(x["zr"]) / (1 + np.exp(x["zr"])))
    ),
    "fdpo_alpha": lambda x, h: -logsig(
        h["beta"] / h["alpha"] * (np.exp(x["zr"]) ** -h["alpha"] - np.exp(x["zc"]) ** -h["alpha"])
    ),
    "ld_dpo": lambda x, h: -logsig(h["beta"] * (
        x["hc"] - x["hr"] + h["ld_alpha"] * (x["zc"] - x["hc"]) - h["ld_alpha"] * (x["zr"] - x["hr"])
    )),
    "wpo": lambda x, h: x["w"] * dpo(x, h),
    "wpo_unaligned": lambda x, h: x["u"] * dpo(x, h),
    "rpo": lambda x, h: dpo(x, h) - h["nll_coef"] * x["lc"] / x["nc"],
    "dpop": lambda x, h: -logsig(h["beta"] * (x["zc"] - x["zr"] - h["lam"] * max(0, -x["zc"]))),
    "slic": lambda x, h: max(0, h["delta"] - x["lc"] + x["lr"]) - h["nll_coef"] * x["lc"],
    "rso_hinge": lambda x, h: max(0, 1 - (h["beta"] * x["zc"] - h["beta"] * x["zr"])),
    "ipo": lambda x, h: (x["zc"] / x["nc"] - x["zr"] / x["nr"] - 0.5 / h["tau"]) ** 2,
    "ipo_sum": lambda x, h: (x["zc"] - x["zr"] - 0.5 / h["tau"]) ** 2,
    "orpo": lambda x, h: -h["nll_coef"] * x["mc"] - h["lam"] * logsig(odds(x["mc"]) - odds(x["mr"])),
    "simpo": lambda x, h: -logsig(h["beta"] * x["mc"] - h["beta"] * x["mr"] - h["gamma"]),
    "alpha_po": lambda x, h: -logsig(
        h["beta"] / h["alpha"] * (np.exp(-h["alpha"] * x["mr"]) - np.exp(-h["alpha"] * x["mc"])) - h["gamma"]
    ),
    "cpo": lambda x, h: -logsig(h["beta"] * (x["lc"] - x["lr"])) - h["nll_coef"] * x["lc"],
    "sppo": lambda x, h: (x["zc"] - h["eta"] * (1 - 0.5)) ** 2 + (x["zr"] - h["eta"] * (0 - 0.5)) ** 2,
    "nca": lambda x, h: (
        -logsig(h["beta"] * x["zc"]) - 0.5 * sum(logsig(-h["beta"] * z) for z in (x["zc"], x["zr"]))
    ),
    "exo": exo,
    "bco_pair": lambda x, h: -logsig(h["beta"] * x["zc"]) - logsig(-h["beta"] * x["zr"]),
    "apo_zero": lambda x, h: 1 - sig(h["beta"] * x["zc"]) + sig(h["beta"] * x["zr"]),
    "apo_down": lambda x, h: sig(h["beta"] * x["zc"]) + 1 - sig(h["beta"] * (x["zc"] - x["zr"])),
    "discopop": discopop,
    "nll_tokens": lambda x, h: dpo(x, h) - h["nll_coef"] * x["lc"] * x["pairs"] / x["tokens"],
}


def facts(batch, at=None):
    """What the formulas are made of, for every pair that counts; weights from the arrays `at`."""
    at, found = batch if at is None else at, []
    f64 = {k: np.asarray(batch[k], np.float64) for k in VALUES}
    for i in range(B):
        kept = {s: [t for t in range(T) if batch[f"{side}_mask"][i, t]] for s, side in (("c", "chosen"), ("r", "rejected"))}
        if not (kept["c"] and kept["r"]):
            continue
        x, shorter = {"w": 1.0, "u": 1.0}, min(map(len, kept.values()))
        for s, side in (("c", "chosen"), ("r", "rejected")):
            logp, ref = f64[f"{side}_logp"][i], f64[f"ref_{side}_logp"][i]
            x |= {f"z{s}": sum(logp[t] - ref[t] for t in kept[s]), f"l{s}": sum(logp[t] for t in kept[s])}
            x[f"n{s}"] = len(kept[s])
            x |= {f"h{s}": sum(logp[t] - ref[t] for t in kept[s][:shorter]), f"m{s}": x[f"l{s}"] / x[f"n{s}"]}
            own = [float(at[f"{side}_logp"][i, t]) for t in kept[s]]
            x["u"] *= np.exp(np.mean(own))
            x["w"] *= np.exp(np.mean(own) - np.mean([float(batch[f"{side}_collision"][i, t]) for t in kept[s]]))
        found.append(x)
    tokens = sum(x["nc"] for x in found)
    return [{**x, "pairs": len(found), "tokens": tokens} for x in found]


def singles(batch, side="chosen"):
    """(log-ratio, desirable) of every response of a side that counts."""
    f64 = {k: np.asarray(batch[k], np.float64) for k in VALUES}
    gap = f64[f"{side}_logp"] - f64[f"ref_{side}_logp"]
    return [
        (sum(gap[i, t] for t in range(T) if mask[t]), batch["desirable"][i] > 0)
        for i, mask in enumerate(batch[f"{side}_mask"]) if mask.any()
    ]


def loops(batch, at=None):
    """{row: loss} in float64; what is held constant (weights, reference points) is taken from `at`."""
    at = batch if at is None else at
    pairs, out = facts(batch, at), {}
    for name, f in PAPER.items():
        out[name] = sum(f(x, HYPER[name]) for x in pairs) / max(len(pairs), 1)
    between = sorted(x["lc"] - x["lr"] for x in pairs), sorted(x["lc"] - x["zc"] - x["lr"] + x["zr"] for x in pairs)
    apart = sorted(x["zc"] for x in pairs), sorted(x["zr"] for x in pairs)
    for name, (high, low) in zip(QUANTILES, (between, apart), strict=True):
        h = HYPER[name]
        terms = [smoothed(h["beta"] * (a - b), h["label_smoothing"]) for a, b in zip(high, low, strict=True)]
        out[name] = sum(terms) / max(len(pairs), 1)
    rows = singles(batch)
    mismatches = [z for z, _ in singles(at, "rejected")]
    for name, kl in (("kto", max(0, np.mean(mismatches)) if mismatches else 0.0), ("apo_unpaired", 0.0)):
        h = HYPER[name]
        terms = [
            h["desirable_weight"] * (1 - sig(h["beta"] * (z - kl))) if good
            else h["undesirable_weight"] * (1 - sig(h["beta"] * (kl - z))) for z, good in rows
        ]
        out[name] = sum(terms) / max(len(terms), 1)
    means = [np.mean(zs) for zs in ([z for z, good in singles(at) if good == kind] for kind in (True, False)) if zs]
    delta, beta = np.mean(means) if means else 0.0, HYPER["bco"]["beta"]
    kinds = [[-logsig(beta * (z - delta) * sign) for z, good in rows if good == (sign > 0)] for sign in (1, -1)]
    out["bco"] = sum(np.mean(kind) for kind in kinds if kind)
    return out
