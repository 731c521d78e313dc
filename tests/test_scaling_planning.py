"""Does a plan tell more than chance at equal FLOPs? Real runs are bought back from real tables.

The same for every table, fixed before any of it was computed: runs of more than a tenth of the largest compute are held
out, and their log losses are the target. 15 runs drawn from the cheaper half of the others are given; a budget of 12
median runs is spent on at most 12 more by (a) the plan for that target, (b) chance, (c) an isoFLOP design: runs nearest
to a twelfth of the budget, spread over sizes. The error is the root mean square of the fitted law's log loss at the
target.

Median error over 200 replicates (JAXPT_REPLICATES changes their number), without a purchase, plan, chance, isoFLOP:

    epoch                                 .0224 .0239 .0184 .0198     (here a plan is worse than none)
    kyo_takano                            .0211 .0142 .0164 .0155
    openlm                                .1502 .0471 .0575 .0928
    porian base long kaplan kaplan        .1377 .1118 .1286 .1162
    porian base long kaplan standard      .1315 .1099 .1542 .1866
    porian base short kaplan standard     .0980 .0666 .0766 .0524     (here the isoFLOP design is better)
    porian base short chinchilla standard .0711 .0330 .0385 .0617
    porian tuned short const standard     .1618 .1387 .1473 .1382     (and here, by less than 1%)
    porian tuned long const kaplan        .0817 .0559 .0744 .0895

The plan is better than chance on eight of the nine and than the isoFLOP design on six.
"""

import csv
import os

import numpy as np
import pytest
from scaling_data import KYO_TAKANO, epoch, table

from jaxpt.scaling import chinchilla as ch
from jaxpt.scaling import planning

REPLICATES = int(os.environ.get("JAXPT_REPLICATES", "200"))
START, BUY = 15, 12


def tables():
    """name -> (N, D, loss, C)."""
    N, D, loss = epoch()
    found = {"epoch": (N, D, loss, 6 * N * D)}
    rows = np.genfromtxt(table(KYO_TAKANO), delimiter=",", names=True)
    found["kyo_takano"] = tuple(rows[name] for name in ("N", "D", "loss", "C"))
    with table("openlm_last_checkpoint.csv").open(newline="") as file:
        openlm = list(csv.DictReader(file))
    found["openlm"] = tuple(np.array([float(r[name]) for r in openlm]) for name in ("N", "D", "loss", "C"))
    with table("porian_isoflop_points.csv").open(newline="") as file:
        points = list(csv.DictReader(file))
    for setting in dict.fromkeys((r["dataset"], r["hparams"], r["warmup"], r["decay"], r["param_count"]) for r in points):
        some = [r for r in points if (r["dataset"], r["hparams"], r["warmup"], r["decay"], r["param_count"]) == setting]
        if setting[0] == "rw" and setting[4] != "attention" and len(some) >= 80:
            name = "porian " + " ".join(setting[1:])
            found[name] = tuple(np.array([float(r[key]) for r in some]) for key in ("n", "t", "loss", "flops"))
    return found


def replicate(N, D, loss, C, rng):
    """[4] errors: no purchase, plan, chance, isoFLOP."""
    order = np.argsort(C, kind="stable")
    rest, goal = np.split(order, [int(np.sum(C <= 0.1 * C.max()))])
    start = rng.choice(rest[:max(2 * START, len(rest) // 2)], START, replace=False)
    pool = np.setdiff1d(rest, start)
    budget = BUY * float(np.median(C[pool]))
    fitted = lambda rows: ch.fit(ch.prepare(N[rows], D[rows], loss[rows]))  # noqa: E731
    found = fitted(start)
    try:
        bought = planning.plan(found, planning.loss_at(N[goal], D[goal]), N[pool], D[pool], C[pool], BUY, budget,
                               again=False, se=1.0).rows
    except ValueError:  # the 15 runs say nothing of the target: then chance decides
        bought = np.array([], int)

    def affordable(candidates):
        chosen, left = [], budget
        for row in candidates:
            if len(chosen) < BUY and C[row] <= left:
                chosen.append(row)
                left -= C[row]
        return np.array(chosen, int)

    near = pool[np.argsort(np.abs(np.log(C[pool] * BUY / budget)), kind="stable")[:2 * BUY]]
    designs = [np.array([], int), pool[bought] if len(bought) else None, affordable(rng.permutation(pool)),
               affordable(near[np.argsort(N[near], kind="stable")][::2])]
    designs[1] = designs[2] if designs[1] is None else designs[1]
    out = []
    for more in designs:
        with np.errstate(all="ignore"):  # a fit to 15 runs may be wild; medians are compared
            law = ch.law(fitted(np.concatenate([start, more])).params, N[goal], D[goal])
            out.append(np.nan_to_num(np.sqrt(np.mean(np.log(law / loss[goal]) ** 2)), nan=np.inf))
    return out


@pytest.mark.slow
def test_plans_on_real_tables(capsys):
    medians = {}
    for name, columns in tables().items():
        rng = np.random.default_rng(0)
        medians[name] = np.median([replicate(*columns, rng) for _ in range(REPLICATES)], axis=0)
        with capsys.disabled():
            print(f"\n{name:44s}", "none {:.4f} plan {:.4f} chance {:.4f} isoFLOP {:.4f}".format(*medians[name]), end="")
    ratios = np.log([m[1] / m[2:] for m in medians.values()])
    assert np.all(ratios.mean(axis=0) < 0), np.exp(ratios)
