"""No false alarm on right functions in torch: the museum's put right, and others as libraries write them."""

import pytest

from jaxpt.verify import check

torch = pytest.importorskip("torch")
F = torch.nn.functional
pytestmark = pytest.mark.peers
SEEDS = 5


def keep(x, mask):
    return torch.where(mask > 0, x, torch.zeros_like(x))


def mean(x, mask):
    return keep(x, mask).sum() / (mask > 0).sum().clamp(min=1)


def clipped(logp, old_logp, advantages, mask, low=0.2, high=0.2):
    ratio = (keep(logp, mask) - keep(old_logp, mask).detach()).clamp(-20, 20).exp()
    advantages = keep(advantages, mask).detach()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


# --- policies


def ppo(logp, old_logp, advantages, mask):
    return mean(clipped(logp, old_logp, advantages, mask), mask), {"tokens": (mask > 0).sum()}


def grpo(logp, old_logp, advantages, mask):
    tokens = (mask > 0).sum(1)
    rows = clipped(logp, old_logp, advantages, mask).sum(1) / tokens.clamp(min=1)
    return rows.sum() / (tokens > 0).sum().clamp(min=1)


def dr_grpo(logp, old_logp, advantages, mask):
    return clipped(logp, old_logp, advantages, mask).sum() / (8 * len(mask))


def cispo(logp, old_logp, advantages, mask):
    logp, old_logp, advantages = (keep(x, mask) for x in (logp, old_logp, advantages))
    weight = (logp - old_logp).clamp(-20, 20).exp().clamp(max=1.28).detach()
    return mean(-weight * advantages.detach() * logp, mask)


# --- KL, sums


def k2(logp, ref_logp):
    return (logp - ref_logp).square() / 2


def k3(logp, ref_logp):
    gap = (ref_logp - logp).clamp(-20, 20)
    return torch.expm1(gap) - gap


def token_mean(per_token, mask):
    return mean(per_token, mask)


def accumulated(per_token, mask, micro):
    tokens = (mask > 0).sum().clamp(min=1)
    return sum(keep(per_token[micro == m], mask[micro == m]).sum() / tokens for m in micro.unique())


# --- advantages


def centred(rewards, group):
    out = torch.zeros_like(rewards)
    for label in group.unique():
        r = rewards[group == label] - rewards[group == label][0]
        out[group == label] = r - r.mean()
    return out


def standardised(rewards, group):
    out = torch.zeros_like(rewards)
    for label in group.unique():
        r = rewards[group == label]
        if len(r) > 1 and r.max() - r.min() > 1e-6 * r.abs().max():
            out[group == label] = (r - r.mean()) / (r.std() + 1e-6)
    return out


def gae(rewards, values, mask, gamma, lam):
    after = ahead = torch.zeros(len(rewards), dtype=rewards.dtype)
    out = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        on = mask[:, t] > 0
        now = rewards[:, t] + gamma * after - values[:, t] + gamma * lam * ahead
        after, ahead = torch.where(on, values[:, t], after), torch.where(on, now, ahead)
        out[:, t] = torch.where(on, now, torch.zeros_like(now))
    return out


def whiten(x, mask):
    n = (mask > 0).sum()
    centred = keep(x - mean(x, mask), mask)
    return centred * torch.rsqrt(centred.square().sum() / (n - 1).clamp(min=1) + 1e-8)


# --- logits, values


def logprobs(logits, tokens, temperature=1.0):
    return torch.gather((logits[:, :-1] / temperature).log_softmax(-1), 2, tokens[:, 1:, None]).squeeze(-1)


def forward_kl(student_logits, teacher_logits, mask):
    student, teacher = (keep(x, mask[..., None]).log_softmax(-1) for x in (student_logits, teacher_logits))
    there = torch.isfinite(teacher)
    gap = torch.where(there, teacher, 0.0) - torch.where(there, student, 0.0)
    return mean((teacher.exp() * gap).sum(-1), mask)


def value_loss(values, old_values, returns, mask):
    values, old, returns = (keep(x, mask) for x in (values, old_values, returns))
    near = old + (values - old).clamp(-0.2, 0.2)
    return mean(torch.maximum((values - returns).square(), (near - returns).square()) / 2, mask)


# --- comparisons


def dpo(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp):
    return -F.logsigmoid(0.1 * (chosen_logp - ref_chosen_logp - rejected_logp + ref_rejected_logp))


def simpo(chosen_logp, rejected_logp, chosen_mask, rejected_mask):
    chosen, rejected = (
        keep(logp, mask).sum(1) / (mask > 0).sum(1).clamp(min=1)
        for logp, mask in ((chosen_logp, chosen_mask), (rejected_logp, rejected_mask))
    )
    both = ((chosen_mask > 0).any(1) & (rejected_mask > 0).any(1)).to(chosen.dtype)
    return -(F.logsigmoid(2 * (chosen - rejected) - 0.5) * both).sum() / both.sum().clamp(min=1)


def kto(logp, ref_logp, desirable, kl_logp, kl_ref_logp):
    point = (kl_logp - kl_ref_logp).mean().clamp(min=0).detach()
    gain = 0.1 * (logp - ref_logp - point)
    return (1 - torch.sigmoid(torch.where(desirable > 0, gain, -gain))).mean()


def bradley_terry(chosen_score, rejected_score, margin):
    return F.softplus(rejected_score - chosen_score + margin).mean()


RIGHT = {
    ppo: ("policy_loss", ("token_mean", "homogeneous", "declared_constants", "dual_clip_negative_only")),
    grpo: ("policy_loss", ("sequence_mean", "homogeneous", "declared_constants", "empty_rows_not_counted")),
    dr_grpo: ("policy_loss", ("fixed_budget", "declared_constants")),
    cispo: ("policy_loss", ("token_mean", "homogeneous", "no_dead_zone", "declared_constants")),
    k2: ("kl", ("non_negative", "no_clamp", "gradient_of_kl")),
    k3: ("kl", ("unbiased", "non_negative", "no_clamp")),
    token_mean: ("aggregate", ("token_mean", "empty_rows_not_counted")),
    accumulated: ("accumulate", ("token_mean",)),
    centred: ("group_advantage", ("scale_equivariance", "sums_to_zero", "singleton_zero")),
    standardised: ("group_advantage", ("scale_invariance", "singleton_zero")),
    gae: ("gae", ("masked_reward_dropped",)),
    whiten: ("whiten", ()),
    logprobs: ("logprobs", ("temperature",)),
    forward_kl: ("distillation", ("forward_kl", "shift_invariance")),
    value_loss: ("value_loss", ("pessimistic", "half_square")),
    dpo: ("preference", ("log2_at_margin_0", "monotone", "log_ratios_only")),
    simpo: ("preference_tokens", ("monotone", "length_normalised")),
    kto: ("kto", ("one_reference_point",)),
    bradley_terry: ("reward_model", ("monotone", "shift_invariance")),
}


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("fn", RIGHT, ids=lambda fn: fn.__name__)
def test_right_functions_break_no_law(fn, seed):
    family, claims = RIGHT[fn]
    check(fn, family, claim=claims, framework="torch", examples=40, seed=seed).assert_ok()
