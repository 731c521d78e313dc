"""The verifier on functions in torch: autograd, in-place writes, pairs of a loss and extras."""

import json
from pathlib import Path

import pytest

from jaxpt.cli import main
from jaxpt.verify import check

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.peers
from test_right_in_torch import gae  # noqa: E402  (which needs torch)


def ppo(logp, old_logp, advantages, mask, eps=0.2):
    on, zero = mask > 0, torch.zeros_like(logp)
    change = (torch.where(on, logp, zero) - torch.where(on, old_logp, zero)).clamp(-20, 20)
    ratio, advantages = change.exp(), torch.where(on, advantages, zero)
    per_token = -torch.minimum(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return per_token.sum() / on.sum().clamp(min=1), {"ratio": ratio.mean()}


def dual_clip_always(logp, old_logp, advantages, mask):
    advantages *= mask
    ratio = (logp - old_logp).exp()
    per_token = -torch.maximum(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages), 3 * advantages)
    return ((per_token * mask).sum(-1) / mask.sum(-1)).mean()


def dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.1):
    return -torch.nn.functional.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))


def log_of_sigmoid(chosen, rejected, ref_chosen, ref_rejected, beta=0.1):
    return -torch.log(torch.sigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))).mean()


def dropout(per_token, mask):
    return torch.nn.functional.dropout(torch.where(mask > 0, per_token, torch.zeros_like(per_token))).sum()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fn, family, claims", [
    (ppo, "policy_loss", ("token_mean", "homogeneous")),
        (dpo, "preference", ("log2_at_margin_0", "monotone", "log_ratios_only")),
    (gae, "gae", ("masked_reward_dropped",)),
])
def test_right_functions(fn, family, claims, seed):
    check(fn, family, claim=claims, framework="torch", examples=60, seed=seed).assert_ok()


@pytest.mark.parametrize("fn, family, expected", [
    (dual_clip_always, "policy_loss", {"mask_poison", "all_masked", "inputs_untouched", "finite", "on_policy"}),
    (log_of_sigmoid, "preference", {"finite"}), (dropout, "aggregate", {"same_twice"}),
])
def test_wrong_functions(fn, family, expected):
    assert expected <= set(check(fn, family, framework="torch", examples=60).broken)


def test_bool_masks_float64_and_declared_constants():
    options = dict(framework="torch", examples=12, mask="bool", dtype="float64")
    check(ppo, "policy_loss", **options).assert_ok()
    report = check(ppo, "policy_loss", claim=("declared_constants",), **options)
    assert set(report.broken) == {"declared_constants"}  # nothing is detached in it


def test_the_framework_is_guessed():
    assert check(dpo, "preference", examples=4).framework == "torch"


def test_a_report_is_a_function_of_the_seed_in_whichever_process(monkeypatch, capsys):
    """Every verdict is a child's, and its hashes are others."""
    words = (f"{Path(__file__).parents[1] / 'verify_targets.py'}:squares", "--family", "router_balance", "--framework", "torch",
             "--claim", "probabilities_alone", "--law", "probabilities_alone,duplication", "--examples", "8", "--json")
    outs = []
    for salt, seed in (("1", "0"), ("2", "0"), ("1", "7")):
        monkeypatch.setenv("PYTHONHASHSEED", salt)
        assert main(("verify", *words, "--seed", seed)) == 1
        outs.append(capsys.readouterr().out)
    one, again, other = outs
    assert one == again
    broken = [next(law for law in json.loads(out)["laws"] if law["status"] == "broken") for out in (one, other)]
    assert broken[0]["counterexample"] != broken[1]["counterexample"]
