"""The table of scaling laws and the fit of any of them: recovery, oracles, what a fit must not depend on."""

import csv
import gzip
import inspect
from functools import cache, partial
from itertools import combinations

import jax
import numpy as np
import pytest
from scaling_data import RANGES, law_runs
from scaling_data import table as data_table
from scipy import integrate, optimize, special

from jaxpt.scaling import chinchilla as ch
from jaxpt.scaling import general, sampling
from jaxpt.scaling import uncertainty as un
from jaxpt.scaling.either import log_rise
from jaxpt.scaling.laws import parameters, predict, table, user_law
from jaxpt.scaling.laws_experts import saturated
from jaxpt.scaling.robust import OBJECTIVES, continuation, penalty, value
from jaxpt.scaling.study import study_law

LAWS = table()
RUNS = 48
runs = partial(law_runs, count=RUNS)


@cache
def noisy(objective):
    """A law that has a closed form, so that there is another fit to compare with."""
    return general.fit(general.prepare(LAWS["chinchilla"], *runs(LAWS["chinchilla"], 0.01)), objective)


@pytest.mark.parametrize("name", LAWS)
def test_noise_free_runs_give_the_law_back(name):
    law = LAWS[name]
    found = general.fit(general.prepare(law, *runs(law)))
    np.testing.assert_allclose(found.params, law.values, rtol=1e-6)
    proof = found.certificate
    assert not proof.at_bounds and (proof.converged or found.value < 1e-20)
    assert proof.starts == general.STARTS and proof.minima >= 1


@pytest.mark.parametrize("name", LAWS)
def test_rows_are_complete(name):
    law = LAWS[name]
    assert law.name == name == name.lower() and law.paper
    assert law.output in ("loss", "batch", "steps", "lr", "accuracy", "error", "coverage", "reward")
    assert len(law.values) == len(law.names) and set(law.real) <= set(law.names)
    assert set(law.nonnegative) <= set(law.inputs) <= set(RANGES) and law.residual in ("log", "raw")
    for unknown in law.names:
        assert unknown in law.formula or name == "farseer", unknown
    guessed = law.guess(general.cube(32, 12), runs(law)[1], *runs(law)[0].values())
    theta = np.stack([np.broadcast_to(np.asarray(g, float), 32) for g in guessed], -1)
    assert np.all((theta > 0) | ~law.positive) and np.all(np.isfinite(theta))


def test_kaplan_s_joint_law_is_no_sum():
    """Kaplan et al. 2020, eq. 1.5, at N = 1.5e9, D = 2e10: often written as a sum of two or three powers."""
    N, D = 1.5e9, 2e10
    assert LAWS["kaplan_nd"].predict(N, D, N_c=8.8e13, D_c=5.4e13, alpha_N=0.076, alpha_D=0.095) == pytest.approx(
        2.381, abs=5e-4)
    of_N, of_D = (LAWS["kaplan_n"].predict(N, N_c=8.8e13, alpha_N=0.076),
                  LAWS["kaplan_d"].predict(D, D_c=5.4e13, alpha_D=0.095))
    assert of_N + of_D == pytest.approx(4.422, abs=5e-4)


def test_kaplan_s_exponents_of_allocation():
    """N ~ C^0.71 comes from the fit of L(C_min), 0.054 / 0.076; the exponents of L(N, D) alone give 0.556."""
    assert 0.054 / 0.076 == pytest.approx(0.71, abs=1e-3)
    assert 0.095 / (0.076 + 0.095) == pytest.approx(0.556, abs=1e-3)


def test_laws_that_contain_each_other():
    N, D = np.array([1e8, 1e9, 1e10]), np.array([1e10, 3e10, 1e11])
    five = dict(A=406.4, B=410.7, E=1.69, alpha=0.34, beta=0.28)
    plain = LAWS["chinchilla"].predict(N, D, **five)
    np.testing.assert_allclose(plain, ch.law(np.array(list(five.values())), N, D), rtol=1e-14)
    np.testing.assert_allclose(LAWS["data_penalty"].predict(N, D, D, **five, P=0.3), plain, rtol=1e-14)
    once = LAWS["data_constrained"].predict(N, D, D, **five, R_D=15.0, R_N=1e6)
    np.testing.assert_allclose(once, plain, rtol=1e-4)
    far = LAWS["data_saturating"].predict(N, D, 1e300, E=1.69, L_0=1e9, a=406.4e-9, b=410.7e-9, c=1.0, alpha=0.34,
                                          beta=0.28, gamma=0.4, delta=0.5)
    np.testing.assert_allclose(far, plain, rtol=1e-8)
    tied = LAWS["chinchilla_tied"].predict(N, D, A=300.0, B=500.0, E=1.7, alpha=0.3)
    gadre = LAWS["overtraining"].predict(N, D, E=1.7, a=300.0 * 6**0.15, b=500.0 * 6**0.15, eta=0.15)
    np.testing.assert_allclose(gadre, tied, rtol=1e-12)
    np.testing.assert_allclose(LAWS["krajewski"].predict(N, D, 1.0, a=17.0, b=30.0, c=0.5, g=3.0, alpha=0.1, beta=0.15,
                                                         gamma=0.6),
                               LAWS["chinchilla"].predict(N, D, A=20.0, B=30.0, E=0.5, alpha=0.1, beta=0.15))


def test_repeated_tokens_are_worth_less_and_less():
    """Muennighoff et al. 2023: 4 epochs are nearly new tokens, 1000 are worth 1 + R_D."""
    law = LAWS["data_constrained"]
    named = dict(zip(law.names, law.values, strict=True))
    U, N = 1e10, 1e8

    def worth(epochs):
        loss = law.predict(N, epochs * U, U, **named)
        return (named["B"] / (loss - named["E"] - named["A"] / N ** named["alpha"])) ** (1 / named["beta"]) / U

    assert worth(1.0) == pytest.approx(1, rel=1e-9) and worth(4.0) == pytest.approx(3.73, abs=0.01)
    assert worth(1e3) == pytest.approx(1 + 15.387756, rel=1e-6)


def test_experts_saturate_and_help():
    assert saturated(1.0, 1.847, 314.478) == pytest.approx(1.847) and saturated(1e12, 1.847, 314.478) < 314.479
    law = LAWS["joint_experts"]
    named = dict(zip(law.names, law.values, strict=True))
    N, D = np.array([1e8, 1e9, 3e9]), np.array([1e10, 1e11, 1e12])
    one, eight = (law.predict(N, D, E, **named) for E in (1.0, 8.0))
    assert np.all(eight < one)
    flipped = named | {"delta": 0.2285, "gamma": -0.0098, "omega": -0.5529, "zeta": 0.0259}
    assert np.all(law.predict(N[:2], D[:2], 8.0, **flipped) > one[:2])  # with the other reading experts would harm


def test_pass_at_k_of_a_beta_population():
    law = LAWS["beta_binomial"]
    for a, b in ((0.35, 6.0), (2.0, 3.0)):
        k = np.array([1.0, 7.0, 1000.0])
        exact = 1 - special.beta(a, b + k) / special.beta(a, b)
        np.testing.assert_allclose(law.predict(k, alpha=a, beta=b), exact, rtol=1e-11)
        by_parts = integrate.quad(lambda p, a=a, b=b: (1 - (1 - p) ** 7) * p ** (a - 1) * (1 - p) ** (b - 1), 0, 1)[0]
        assert exact[1] == pytest.approx(by_parts / special.beta(a, b), rel=1e-7)
    tail = 1 - law.predict(np.array([1e5, 1e6]), alpha=0.35, beta=6.0)
    assert np.log10(tail[0] / tail[1]) == pytest.approx(0.35, abs=1e-4)


def test_log_rise():
    x, a = np.geomspace(1e-3, 1e3, 200), np.linspace(0.01, 3, 200)
    np.testing.assert_allclose(log_rise(x, a), special.gammaln(x + a) - special.gammaln(x), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(log_rise(1e9, 1.0), np.log(1e9), rtol=1e-14)


def test_a_break_joins_two_powers():
    law, named = LAWS["bnsl"], dict(a=0.0, b=3.0, c_0=0.2, c_1=0.5, d_1=1e5, f_1=0.1)
    near, far = (np.log(law.predict(np.array([x, 2 * x]), **named)) for x in (1e2, 1e8))
    np.testing.assert_allclose([near[0] - near[1], far[0] - far[1]], np.log(2) * np.array([0.2, 0.7]), rtol=1e-9)


def test_sampling_by_enumeration():
    rng = np.random.default_rng(0)
    proxy, gold = rng.integers(0, 4, 6).astype(float), rng.normal(size=6)
    for n in (1, 2, 4, 6):
        means = []
        for chosen in combinations(range(6), n):
            top = max(proxy[list(chosen)])
            means.append(np.mean([gold[i] for i in chosen if proxy[i] == top]))
        assert sampling.best_of_n(proxy, gold, n) == pytest.approx(np.mean(means))
        distinct = proxy + 1e-9 * np.arange(6)
        assert sampling.best_of_n(distinct, gold, n) == pytest.approx(
            np.mean([gold[max(c, key=lambda i: distinct[i])] for c in combinations(range(6), n)]))
        right = gold > 0
        assert sampling.pass_at_k(6, right.sum(), n) == pytest.approx(
            np.mean([right[list(c)].any() for c in combinations(range(6), n)]))
    with pytest.raises(ValueError, match="k = 7"):
        sampling.pass_at_k(6, 2, 7)
    with pytest.raises(ValueError, match="n = 0"):
        sampling.best_of_n(proxy, gold, 0)
    with pytest.raises(ValueError, match="bon or rl"):
        sampling.overoptimisation_peak("ppo", 1.0, 1.0)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_of_the_residual(objective):
    shape = continuation(objective, 0.1)[-1]
    r = np.array([-3.0, -0.35, -0.04, 0.0, 0.03, 0.2, 5.0]) * (1e-9 if objective == "lad" else 1.0)
    step = 1e-6 * (1e-9 if objective == "lad" else 1.0)
    up, here, down = (penalty(r + s, shape) for s in (step, 0.0, -step))
    smooth = np.abs(r) > 2 * step  # the asymmetric loss has a jump of curvature at 0
    np.testing.assert_allclose(((up.rho - down.rho) / (2 * step))[smooth], here.psi[smooth], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(((up.psi - down.psi) / (2 * step))[smooth], here.curvature[smooth], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(here.weight * r, here.psi, rtol=1e-12)
    if objective == "asymmetric":
        np.testing.assert_allclose(penalty(2.0, shape).rho, 10 * penalty(-2.0, shape).rho)
    assert value(r, np.ones(7), objective, 0.1) >= 0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_closed_form_agrees(objective):
    found = noisy(objective)
    x, y = runs(LAWS["chinchilla"], 0.01)
    closed = ch.fit(ch.prepare(x["N"], x["D"], y), objective)
    np.testing.assert_allclose(found.params, closed.params, rtol=1e-7)
    assert found.value == pytest.approx(closed.value, rel=1e-10) and found.certificate.converged
    if objective == "huber":
        np.testing.assert_allclose(un.leverage(found)[np.argsort(found.data.order)],
                                   un.leverage(closed)[np.argsort(closed.data.order)], rtol=1e-7)
        np.testing.assert_allclose(un.profile_intervals(found), un.profile_intervals(closed), rtol=2e-3)


@pytest.mark.parametrize("objective", ["huber", "lad"])
def test_order_units_and_scale_do_not_matter(objective):
    law, plain = LAWS["chinchilla"], noisy(objective)
    x, y = runs(law, 0.01)
    p = np.random.default_rng(0).permutation(RUNS)
    other = general.fit(general.prepare(law, {k: v[p] for k, v in x.items()}, y[p]), objective)
    np.testing.assert_array_equal(other.params, plain.params)
    units = general.fit(general.prepare(law, {"N": x["N"] / 1e6, "D": x["D"] / 1e9}, y), objective).params
    alpha, beta = plain.params[3:]
    np.testing.assert_allclose(units * [1e6**alpha, 1e9**beta, 1, 1, 1], plain.params, rtol=1e-6)
    for scale in (1 / RUNS, 1e6):
        scaled = general.fit(general.prepare(law, x, y, np.full(RUNS, scale)), objective)
        np.testing.assert_allclose(scaled.params, plain.params, rtol=1e-7)
        assert scaled.value == pytest.approx(scale * plain.value, rel=1e-9)


def test_the_unit_of_a_raw_measurement_does_not_matter():
    law = LAWS["overoptimisation_rl"]
    x, y = runs(law, 0.02)
    one, thousand = (general.fit(general.prepare(law, x, unit * y)).params for unit in (1.0, 1e3))
    np.testing.assert_allclose(thousand, 1e3 * one, rtol=1e-8)


def test_refits_are_at_their_own_optima():
    fit = noisy("huber")
    refitted, draws = un.refits(fit, "case", 12, 0), un.draws(fit, "case", 12, 0)["weight"]
    again = un.refits(fit, "case", 12, 0)
    np.testing.assert_array_equal(refitted.params, again.params)
    data = ch.prepare(*runs(LAWS["chinchilla"], 0.01)[0].values(), runs(LAWS["chinchilla"], 0.01)[1])
    assert np.array_equal(data.order, fit.data.order)
    starts = ch.starts(data, 1e-2)
    best = [ch.solve(data, starts, fit.deltas, weight=np.repeat(w[None], len(starts), axis=0)).value.min() for w in draws]
    above = refitted.value / best - 1  # noise is ten times the threshold here: a refit may get stuck, and says so
    assert refitted.converged.sum() >= 11 and (above[refitted.converged] < 1e-8).all() and above.max() < 1e-3


def test_a_given_parameter_stays():
    law = LAWS["chinchilla"]
    x, y = runs(law, 0.01)
    held = general.fit(general.prepare(law, x, y, fixed={"E": 1.69}))
    assert held.params[2] == pytest.approx(1.69, rel=1e-14) and not held.free[2]
    free = optimize.minimize(
        lambda t: value(np.log(ch.law(np.array([*np.exp(t[:2]), 1.69, *t[2:]]), x["N"], x["D"]) / y), np.ones(RUNS),
                        "huber", 1e-3), [*np.log(held.params[:2]), *held.params[3:]], method="Nelder-Mead",
        options={"maxiter": 500})
    assert held.value <= free.fun * (1 + 1e-9)
    result = study_law(held, bootstrap=20)
    assert result.params.se[2] < 1e-12 and np.ptp(result.profile[2]) == 0 and result.params.se[3] > 0
    assert general.fit(general.prepare(law, x, y, fixed={"E": 1.69}), "lad").params[2] == pytest.approx(1.69, rel=1e-14)


def test_a_study_predicts_and_warns():
    law = LAWS["envelope"]
    x, y = runs(law, 0.003)
    result = study_law(general.fit(general.prepare(law, x, y)), bootstrap=100, at={"C": 1e24})
    true = predict(law, np.array(law.values), [np.array([1e24])])[0]
    assert result.predicted_spread.low < result.predicted < result.predicted_spread.high
    assert result.predicted == pytest.approx(true, rel=0.05)
    assert any("C = 1e+24 is more than 10 times beyond the runs" in s for s in result.warnings)
    few = study_law(general.fit(general.prepare(law, {"C": x["C"][:4]}, y[:4])), bootstrap=0)
    assert any("4 runs for 3 parameters" in s for s in few.warnings)
    same = study_law(general.fit(general.prepare(law, {"C": np.full(4, 1e18)}, y[:4])), bootstrap=0)
    assert any("C is the same in all runs" in s for s in same.warnings)
    assert any("only 1 different (C); 3 parameters" in s for s in same.warnings)


def test_a_law_of_one_s_own():
    def mine(N, D, *, A=300.0, alpha=0.3, shift=-0.5):
        """Loss of my runs."""
        return A / N**alpha + shift * jax.numpy.log10(D)

    law = user_law(mine, "mine")
    assert (law.inputs, law.names, law.real) == (("N", "D"), ("A", "alpha", "shift"), ("shift",))
    rng = np.random.default_rng(0)
    x = {"N": np.exp(rng.uniform(3, 6, RUNS)), "D": 10 ** rng.uniform(0.1, 1, RUNS)}
    y = 900.0 / x["N"] ** 0.4 - 0.7 * np.log10(x["D"])
    np.testing.assert_allclose(general.fit(general.prepare(law, x, y)).params, [900.0, 0.4, -0.7], rtol=1e-6)
    for bad, words in ((lambda N: N, "columns, a star, parameters"), (lambda *, a=1.0: a, "columns, a star"),
                       (eval("lambda N, *, a: a"), "needs a number as its default"),
                       (eval("lambda N, *, a='x': a"), "needs a number as its default")):
        with pytest.raises(ValueError, match=words):
            user_law(bad, "bad")


def test_bad_arrays_are_refused():
    law = LAWS["kaplan_n"]
    x, y = runs(law)
    for bad in (-1.0, 0.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="N must be finite and above 0"):
            general.prepare(law, {"N": np.where(np.arange(RUNS) == 3, bad, x["N"])}, y)
        with pytest.raises(ValueError, match="loss and weights must be finite and above 0"):
            general.prepare(law, x, np.where(np.arange(RUNS) == 3, bad, y))
    with pytest.raises(ValueError, match="2 parameters to fit: 1 runs"):
        general.fit(general.prepare(law, {"N": x["N"][:1]}, y[:1]))
    zero = LAWS["overoptimisation_bon"]
    general.prepare(zero, {"KL": np.array([0.0, 1.0])}, np.array([0.0, 0.45]))
    with pytest.raises(ValueError, match="not below 0"):
        general.prepare(zero, {"KL": np.array([-1.0, 1.0])}, np.array([0.0, 0.45]))


def test_double_precision_stays_inside():
    general.fit(general.prepare(LAWS["log_linear"], *runs(LAWS["log_linear"])))
    assert not jax.config.jax_enable_x64 and jax.numpy.ones(2).dtype == np.float32


def test_many_refits_keep_memory_bounded():
    """Blocks of a fixed number of residuals, whatever the number of refits or runs."""
    for n in (5, 240, 100_000):
        data = general.prepare(LAWS["log_linear"], {"T": np.full(n, 2.0)}, np.ones(n))
        assert general.block(data) * n <= max(general.BLOCK, n)


@pytest.mark.parametrize("router, n, expected", [
    ("S-BASE", 61, (-0.084, -0.123, 0.010, 1.122, 2.39, 218)), ("RL-R", 62, (-0.083, -0.128, 0.012, 1.114, 1.99, 424)),
    ("HASH", 59, (-0.089, -0.146, 0.013, 1.173, 4.99, 369))])
def test_clark_s_routed_runs(router, n, expected):
    """Clark et al. 2022, their published curves: k = 1, half of the layers routed, dense models as E = 1, last step."""
    last = {}
    with gzip.open(data_table("clark_routed_curves.csv.gz"), "rt", newline="") as file:
        for row in csv.DictReader(file):
            if row["k"] == "1" and float(row["routing_frequency"]) == 0.5 and int(row["step"]) >= last.get(
                    row["hyper_id"], (-1,))[0]:
                last[row["hyper_id"]] = int(row["step"]), row
    kept = [row for _, row in last.values() if row["router_type"].upper() in ("DENSE", router)]
    assert len(kept) == n
    N, E, y = (np.array([float(row[c]) for row in kept]) for c in ("dense_parameter_count", "num_experts",
                                                                   "loss_validation"))
    found = general.fit(general.prepare(LAWS["clark"], {"N": N, "E": E}, y), "lsq")
    np.testing.assert_allclose(found.params[:3], expected[:3], atol=6e-4)
    np.testing.assert_allclose(found.params[3:], expected[3:], rtol=5e-3)
    assert np.sqrt(np.mean(found.residuals**2)) / np.log(10) == pytest.approx(0.003, abs=1e-3)


def test_parameters_and_signatures():
    law = LAWS["task_sigmoid"]
    assert list(inspect.signature(law.predict).parameters) == [*law.inputs, *law.names]
    np.testing.assert_allclose(parameters(law, np.zeros((2, 4))), [[1, 0, 1, 1]] * 2)
