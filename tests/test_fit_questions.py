"""`jaxpt fit`: what the fitted law says of other counts, serving, data that run out, money; against its closed forms."""

import json
import os

import numpy as np
import pytest
import scaling_data

from jaxpt.cli import main
from jaxpt.scaling import costs, flops
from jaxpt.scaling.chinchilla import fit as certified
from jaxpt.scaling.chinchilla import law, prepare
from jaxpt.scaling.frontier import compute_for, optimum
from jaxpt.scaling.questions import Asked
from jaxpt.scaling.questions import answers as answered
from jaxpt.scaling.uncertainty import refits

TRUE = np.array([406.4, 410.7, 1.69, 0.34, 0.28])
LAYERS, WIDTH = np.repeat([2.0, 4, 6, 8, 12], 5), np.repeat([128.0, 256, 384, 512, 768], 5)
VOCAB, CONTEXT, HEADS = 1000.0, 512.0, WIDTH / 64
SHAPE = flops.Shape(LAYERS, WIDTH, 4 * WIDTH, HEADS, np.full(25, 64.0), VOCAB, CONTEXT)
N = flops.layer_params(SHAPE) + flops.head_params(SHAPE)
D = np.tile(np.geomspace(1e9, 1e11, 5), 5)
LOSS = law(TRUE, N, D) * np.exp(0.003 * np.random.default_rng(0).normal(size=25))
HEADER = "N,D,loss,n_layers,d_model,n_heads,flops"
BUDGET = ["--budget", "1e21"]
MACHINE = ["--machine", "peak=989T,mfu=0.4,price=2.5"]


def text(per_token=6 * N):
    rows = zip(N, D, LOSS, LAYERS, WIDTH, HEADS, per_token * D, strict=True)
    return "\n".join([HEADER, *(",".join(repr(float(x)) for x in row) for row in rows)]) + "\n"


@pytest.fixture
def fit(tmp_path, capsys):
    def run(*words, content=text()):
        (tmp_path / "runs.csv").write_text(content)
        code = main(["fit", str(tmp_path / "runs.csv"), "--bootstrap", "20", *words])
        out, err = capsys.readouterr()
        return code, out, err.replace(str(tmp_path) + os.sep, "")
    return run


@pytest.fixture
def answers(fit):
    """(parameters, answers) of the JSON, which has no NaN."""
    def run(*words, **given):
        code, out, err = fit("--json", *words, **given)
        assert code == 0, err
        entry = json.loads(out, parse_constant=pytest.fail)
        return np.array(list(entry["params"].values())), entry["answers"]
    return run


def test_a_token_served_and_plentiful_data_change_nothing(answers):
    params, found = answers(*BUDGET, "--serve", "1", "--unique", "1e16", "--count", "table")
    best = optimum(params, 1e21)
    for name in ("served", "limited", "counted"):
        for key, value in best._asdict().items():
            assert found[name][key]["value"] == pytest.approx(float(value), rel=1e-5), (name, key)
    assert found["counted"]["a"]["value"] == pytest.approx(params[4] / (params[3] + params[4]), rel=1e-4)
    assert found["limited"]["epochs"]["value"] == pytest.approx(float(best.D) / 1e16, rel=1e-5)


def test_serving_asks_for_a_smaller_model_trained_on_more(answers):
    params, found = answers(*BUDGET, "--serve", "1T", "--reach", "2.3")
    best, served, reach = optimum(params, 1e21), found["served"], found["reach"]
    assert served["N"]["value"] < best.N and served["loss"]["value"] > best.loss
    assert served["training_flops"]["value"] + 2 * served["N"]["value"] * 1e12 == pytest.approx(1e21)
    assert reach["C"]["value"] > compute_for(params, 2.3)
    assert law(params, reach["N"]["value"], reach["D"]["value"]) == pytest.approx(2.3)


def test_counts_against_the_table_s_own_column(answers):
    """A column with attention counted is what --count attention makes of the shapes."""
    content = text(flops.attention(SHAPE))
    shape = ["--shape", f"vocab={VOCAB},context={CONTEXT}"]
    by_shape, by_table = (answers(*BUDGET, "--count", *words, content=content)[1]["counted"]
                          for words in (["attention", *shape], ["table"]))
    for key in ("N", "D", "loss", "a"):
        assert by_shape[key]["value"] == pytest.approx(by_table[key]["value"], rel=1e-6)
        assert by_shape[key]["ci95"] == pytest.approx(by_table[key]["ci95"], rel=1e-6)
    names = ("kaplan", "last-layer", "attention", "chinchilla")
    sizes = [answers(*BUDGET, "--count", name, *shape)[1]["counted"]["N"]["value"] for name in names]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4  # a dearer token buys a smaller model


def test_a_loss_and_a_drop_of_the_loss_are_the_frontier_inverted(answers):
    params, _ = answers(*BUDGET, *MACHINE)
    best = float(optimum(params, 1e21).loss)
    _, found = answers(*BUDGET, "--reach", repr(best), "--loss-drop", "0.05", *MACHINE)
    reach, drop = found["reach"], found["loss_drop"]
    assert reach["C"]["value"] == pytest.approx(1e21) and reach["N"]["se"] > 0
    assert optimum(params, drop["C"]["value"]).loss == pytest.approx(0.95 * best)
    assert drop["factor"]["value"] == pytest.approx(drop["C"]["value"] / 1e21)
    assert drop["factor_if_E_were_0"]["value"] < drop["factor"]["value"]
    assert reach["hours"]["value"] == pytest.approx(1e21 / (989e12 * 0.4 * 3600))
    assert reach["money"]["value"] == pytest.approx(2.5 * reach["hours"]["value"])


def test_a_loss_below_E_is_out_of_reach_and_said_to_be(fit):
    code, out, _ = fit(*BUDGET, "--reach", "1", "--loss-drop", "0.9", "--json")
    entry = json.loads(out, parse_constant=pytest.fail)
    assert code == 0 and entry["answers"]["reach"]["C"]["value"] is None
    assert entry["answers"]["loss_drop"]["factor"]["value"] is None
    assert sum("no compute gets there" in sentence for sentence in entry["warnings"]) == 2


def test_what_a_lower_loss_takes_by_the_chinchilla_runs():
    """The printed rule, 6 to 12 times the compute for a tenth less loss, takes E for 0. By the runs themselves a
    twentieth takes more than that, at every end of the interval, and a tenth is below E for most refits."""
    found = certified(prepare(*scaling_data.epoch()))
    samples = refits(found, "case", 200, 0).params
    tenth, twentieth = (answered(found.params, samples, Asked(budget=5.76e23, loss_drop=share))[0] for share in (0.1, 0.05))
    assert tenth.values["factor"] == np.inf and twentieth.values["factor"] == pytest.approx(262, rel=0.01)
    assert twentieth.spreads["factor"].low > 12 and twentieth.values["factor_if_E_were_0"] < 2
    assert tenth.spreads["factor"].low > 1000 and tenth.spreads["factor"].high == np.inf
    assert np.mean([costs.factor_for_drop(p, 5.76e23, 0.1) == np.inf for p in samples]) > 0.5


def test_money_is_a_budget_and_utilisation_is_money(answers):
    params, by_flops = answers(*BUDGET, *MACHINE)
    bill = by_flops["bill"]["money"]
    assert bill["se"] == 0 and bill["ci95"] == [bill["value"]] * 2
    _, by_money = answers("--money", repr(bill["value"]), *MACHINE, "--better-mfu", "0.5")
    assert by_money["bill"]["hours"]["value"] == pytest.approx(by_flops["bill"]["hours"]["value"])
    worth = by_money["utilisation"]
    gained = optimum(params, 1e21).loss - optimum(params, 1.25e21).loss
    assert worth["loss_drop"]["value"] == pytest.approx(gained, rel=1e-6)
    assert worth["money_saved"]["value"] == pytest.approx(0.2 * bill["value"])


ALL = [*BUDGET, *MACHINE, "--count", "chinchilla", "--shape", "vocab=1000,context=512", "--serve", "1T", "--unique",
       "1T", "--reach", "2.3", "--loss-drop", "0.1", "--better-mfu", "0.5"]
SCHEMA = {
    "counted": ["N", "D", "loss", "a"], "served": ["N", "D", "loss", "training_flops"],
    "limited": ["N", "D", "loss", "epochs"], "reach": ["N", "D", "C", "hours", "money"],
    "loss_drop": ["factor", "factor_if_E_were_0", "C"], "bill": ["hours", "money"],
    "utilisation": ["loss_drop", "share_of_loss", "money_saved"],
}


def test_every_answer_in_json_text_and_markdown(fit):
    entry = json.loads(fit(*ALL, "--json")[1], parse_constant=pytest.fail)
    assert {name: list(answer)[1:] for name, answer in entry["answers"].items()} == SCHEMA
    for answer in entry["answers"].values():
        assert all(set(answer[key]) == {"value", "se", "ci95"} for key in list(answer)[1:])
    said = fit(*ALL)[1]
    assert all(answer["of"] + ":" in said for answer in entry["answers"].values())
    marked = fit(*ALL, "--markdown")[1]
    assert all(f"### {answer['of']}" in marked for answer in entry["answers"].values())
    assert "money saved at equal loss" in said and "first 20 refits" in said
    without = json.loads(fit(*BUDGET, "--json")[1])
    assert "answers" not in without and without["budget"] == entry["budget"]  # questions change no number


@pytest.mark.parametrize("words, sentence", [
    (["--count", "attention"], "--count attention: --budget FLOPS is needed"),
    ([*BUDGET, "--count", "attention"], "--count attention: no column for vocab: --shape vocab=COLUMN or vocab=NUMBER"),
    ([*BUDGET, "--count", "atention"], "--count atention: did you mean attention?"),
    ([*BUDGET, "--count", "kaplan", "--shape", "widht=d_model"], "--shape widht=d_model: did you mean width?"),
    ([*BUDGET, "--count", "kaplan", "--shape", "width=dmodel"], "--shape width=dmodel: runs.csv has no such column"),
    ([*BUDGET, "--count", "kaplan", "--shape", "width=0"], "--shape width: numbers above 0 are expected"),
    ([*BUDGET, "--shape", "width=64"], "--shape: only --count kaplan"),
    (["--unique", "1B"], "--unique 1e+09: --budget FLOPS is needed"),
    (["--serve", "1B"], "--serve: --budget FLOPS or --reach LOSS is needed"),
    ([*BUDGET, "--serve", "1e21"], "--serve 1e+21: serving so many tokens takes all of 1e+21 FLOPs"),
    ([*BUDGET, "--serve", "-1"], "--serve -1: a number above 0 is expected"),
    ([*BUDGET, "--loss-drop", "10"], "--loss-drop 10: a share between 0 and 1 is expected"),
    ([*BUDGET, "--loss-drop", "10%"], "--loss-drop 10%: a number above 0 is expected"),
    ([*BUDGET, "--money", "5"], "--money 5: --machine peak=FLOP/S,mfu=SHARE,price=MONEY is needed"),
    ([*BUDGET, "--money", "5", *MACHINE], "--money 5 and --budget 1e+21 are two budgets"),
    ([*BUDGET, "--machine", "peak=1e15"], "--machine: mfu and price missing"),
    ([*BUDGET, "--machine", "peek=1e15"], "--machine peek=1e+15: did you mean peak?"),
    ([*BUDGET, "--machine", "peak=1e15,mfu=40,price=2"], "--machine mfu=40: a share of the peak"),
    ([*BUDGET, "--machine", "fast"], "--machine fast: NAME=VALUE is expected"),
    (MACHINE, "--machine: --budget FLOPS or --reach LOSS is needed"),
    ([*BUDGET, *MACHINE, "--better-mfu", "1.5"], "--better-mfu 1.5: a share between 0 and 1"),
    (["--law", "kaplan", "--reach", "2"], "--reach: only for --law chinchilla"),
    ([*BUDGET, "--unique", "1B", "--isoflop"], "--unique: --isoflop and --next are reports of their own"),
])
def test_bad_questions_are_one_sentence(fit, words, sentence):
    code, out, err = fit(*words)
    assert code == 2 and out == "" and err.startswith("jaxpt: ") and sentence in err and len(err.splitlines()) == 1


def test_a_count_from_a_table_without_flops(fit):
    content = "\n".join(",".join(line.split(",")[:3]) for line in text().splitlines()) + "\n"
    assert "--count table: the table has no column of FLOPs" in fit(*BUDGET, "--count", "table", content=content)[2]
