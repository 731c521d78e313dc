"""The ladder's rule for sizes and tokens, its schedule, the simulated ladder's exact part, and the two reports of
`jaxpt fit`. Nothing is trained here."""

import json
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpt.cli import main
from jaxpt.cli.fit import own_ladder
from jaxpt.experiments import kaplan_vs_chinchilla as simulated
from jaxpt.experiments import scaling_ladder as ladder
from jaxpt.lab.errors import UserError
from jaxpt.models import make_model
from jaxpt.scaling.chinchilla import law
from jaxpt.train.rung import WARMUP, share

TRUE = np.array([406.4, 410.7, 1.69, 0.34, 0.28])


@pytest.mark.parametrize("tier", ["smoke", "cpu", "full"])
def test_sizes_and_tokens_follow_the_rule(tier):
    cfg = ladder.EXPERIMENT.tiers[tier].config
    found, tokens = ladder.rungs(cfg), cfg.batch * (cfg.window - 1)
    assert len({r.name for r in found}) == len(found) == 5 * cfg.budgets + 1 and (tier == "smoke" or len(found) > 12)
    for r in found:
        C = cfg.smallest * ladder.FACTOR**r.budget
        assert abs(6 * r.N * r.updates * tokens - C) <= 3 * r.N * ladder.CHUNK * tokens  # lengths are whole chunks
        assert r.updates % ladder.CHUNK == 0 and r.D == r.updates * tokens
    for b in range(cfg.budgets):
        sizes = [r.N for r in found if r.budget == b]
        assert np.all(np.diff(sizes) > 0)
        if b:  # the same sizes again, so that lengths share compilations
            assert sizes[:-1] == [r.N for r in found if r.budget == b - 1][1:]
    assert found[-1].name == ladder.LARGEST and found[-1].N in [r.N for r in found[:-1]]


def test_parameters_are_those_of_the_model():
    for wanted in (5e3, 5e4, 3e5):
        model = ladder.shape(wanted)
        shapes = jax.eval_shape(make_model(model).init, jax.random.key(0))
        N = sum(x.size for x in jax.tree.leaves(shapes))
        assert ladder.params(model) == N == pytest.approx(wanted, rel=0.35)  # widths are multiples of 4


@given(st.integers(20, 5000))
def test_the_rate_rises_once_and_ends_at_nothing(updates):
    rate = np.asarray(share(jnp.arange(5000), jnp.float32(updates)))[:updates]
    peak = int(np.argmax(rate))
    assert 0 < rate.min() and rate.max() <= 1 and rate[-1] < 2 / (updates * (1 - WARMUP)) + 1e-6
    assert np.all(np.diff(rate[: peak + 1]) > 0) and np.all(np.diff(rate[peak:]) < 1e-6)
    assert peak <= WARMUP * updates + 1


def test_more_than_one_epoch_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, 6, np.uint8)) for _ in range(30_000)]
    (tmp_path / "text").write_bytes(b"\n\n".join(b" ".join(words[i:i + 60]) for i in range(0, 30_000, 60)))
    cfg = ladder.Config(corpus=str(tmp_path / "text"), held_bytes=5_000)
    with pytest.raises(UserError, match="more than one epoch"):
        ladder.inputs(cfg)


def curves(loss):
    """Curves of the ladder's shape with the held-out losses [seeds, runs]."""
    cfg = ladder.EXPERIMENT.tiers["cpu"].config
    found = ladder.rungs(cfg)
    table = {"inputs/N": np.array([float(r.N) for r in found]), "inputs/budget": np.array([r.budget for r in found]),
             "inputs/D": np.array([float(r.D) for r in found])}
    return table | {f"{r.name}/held": x[:, None] for r, x in zip(found, loss(table).T, strict=True)}


def test_the_claims_on_runs_of_a_law():
    params = np.array([20.0, 60.0, 0.9, 0.35, 0.33])
    rng = np.random.default_rng(0)

    def loss(table):
        exact = law(params, table["inputs/N"], table["inputs/D"])
        return exact * np.exp(0.002 * rng.normal(size=(6, exact.size)))

    table = curves(loss)
    assert np.all(ladder.falls(table) > 0.02) and abs(ladder.falls_among_equals(table).mean()) < 0.1
    found = ladder.errors(table)
    assert found["law"].mean() < found["no_E"].mean() < found["last"].mean()
    assert np.all(ladder.beats_rivals(table) > 0) and ladder.beats_rivals(table, shuffled=True).mean() < 0
    exact = curves(lambda t: np.tile(law(params, t["inputs/N"], t["inputs/D"]), (2, 1)))
    assert np.all(ladder.errors(exact)["law"] < 1e-6)
    data = ladder.ch.prepare(*(exact[f"inputs/{x}"][:-1] for x in ("N", "D")), ladder.held(exact)[0, :-1])
    assert ladder.without_E(data)[2] < 1e-12


def test_the_simulated_ladder_without_noise():
    cfg = simulated.EXPERIMENT.tiers["smoke"].config
    found = simulated.inputs(cfg)
    np.testing.assert_allclose(found["ladder"][0], [0.935, 0.68, 0.583, 0.583, 0.516], atol=0.01)
    assert found["ladder"][0, -1] == pytest.approx(float(found["truth"]), abs=0.01)


@pytest.fixture
def runs(tmp_path):
    rng = np.random.default_rng(0)
    C, N = (x.ravel() for x in np.meshgrid([1e18, 1e19, 1e20], np.geomspace(3e7, 3e9, 9), indexing="ij"))
    loss = law(TRUE, N, C / (6 * N)) * np.exp(0.003 * rng.normal(size=N.size))
    path = tmp_path / "runs.csv"
    path.write_text("N,flops,loss\n" + "".join(f"{a!r},{b!r},{c!r}\n" for a, b, c in
                                               zip(N.tolist(), C.tolist(), loss.tolist(), strict=True)))
    return [str(path), "--d-from", "6"]


def test_isoflop_report(runs, capsys, tmp_path):
    figure = tmp_path / "iso.png"
    assert main(["fit", *runs, "--isoflop", "--bootstrap", "30", "--json", "--figure", str(figure)]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in entry["approaches"]][-1] == "3 law" and len(entry["budgets"]) == 3
    assert entry["approaches"][1]["a"]["value"] == pytest.approx(0.45, abs=0.08)
    assert figure.stat().st_size > 10_000
    for flag in ("--markdown", "--seed=1"):
        assert main(["fit", *runs, "--isoflop", "--bootstrap", "10", flag]) == 0
        assert "2 parabola, corrected" in capsys.readouterr().out


def test_plan_report(runs, capsys):
    assert main(["fit", *runs, "--next", "3", "--spend", "1e20", "--budget", "1e22", "--bootstrap", "50", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert 1 <= len(entry["next"]) <= 3 and sum(run["cost"] for run in entry["next"]) <= 1.0001e20
    assert entry["next"][-1]["se_after"] < entry["target"]["se"] and entry["target"]["name"].startswith("log loss*")
    assert main(["fit", *runs, "--next", "2", "--bootstrap", "50"]) == 0
    assert "a in N* ~ C^a" in capsys.readouterr().out


@pytest.mark.parametrize("flags, said", [
    (["--next", "2", "--target", "N"], "--budget FLOPS is needed"), (["--next", "2", "--spend", "1"], "no run of these"),
    (["--isoflop", "--next", "2"], "two reports"), (["--isoflop", "--fix", "E=1.7"], "only for --law chinchilla")])
def test_what_does_not_fit_is_one_sentence(runs, capsys, flags, said):
    assert main(["fit", *runs, *flags]) == 2
    assert said in capsys.readouterr().err


def test_the_ladder_that_ships_is_of_this_rule_and_is_fitted_where_no_file_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cfg = ladder.EXPERIMENT.tiers["cpu"].config
    made = json.loads(Path(own_ladder()).with_suffix(".json").read_text())
    assert made["config"] == asdict(cfg)
    rows = np.genfromtxt(own_ladder(), delimiter=",", names=True, dtype=None, encoding="utf-8")
    found = {r.name: r for r in ladder.rungs(cfg)}
    assert len(rows) == len(found) * len(made["seeds"]) and set(rows["seed"]) == set(made["seeds"])
    for row in rows:
        assert (row["N"], row["D"]) == (found[row["run"]].N, found[row["run"]].D)
        assert row["held_out"] == (row["run"] == ladder.LARGEST)
    assert main(["fit", "--json", "--bootstrap", "0"]) == 0
    told = json.loads(capsys.readouterr().out)
    data = ladder.ch.prepare(*(rows[name].astype(float) for name in ("N", "D", "loss")))
    assert list(told["params"].values()) == ladder.ch.fit(data).params.tolist() and told["n_points"] == len(rows)
    assert "no file was named" in told["input"]["notes"][0]
