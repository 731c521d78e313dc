"""What is made of logits: log-probabilities, entropies, distillation; and the balance of a router."""

import jax
import jax.numpy as jnp
import numpy as np
from exhibit import Exhibit


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def expected(logp, x):
    """sum p x, 0 where p is 0."""
    p = np.exp(logp)
    return np.where(p > 0, p * x, 0).sum(-1)


# --- log-probabilities of tokens


def logprobs(logits, tokens, temperature=1.0):
    return np.take_along_axis(log_softmax(logits[:, :-1] / temperature), tokens[:, 1:, None], axis=2)[..., 0]


def temperature_left_out(logits, tokens, temperature=1.0):
    return logprobs(logits, tokens)


def over_the_nucleus(logits, tokens):
    """Divided by the mass that top-p keeps, of the tokens that it does not keep as well."""
    logp = log_softmax(logits[:, :-1])
    p = np.sort(np.exp(logp), axis=-1)[..., ::-1]
    kept = np.where(np.cumsum(p, axis=-1) - p < 0.8, p, 0).sum(-1)
    return np.take_along_axis(logp, tokens[:, 1:, None], axis=2)[..., 0] - np.log(kept)


def of_the_token_itself(logits, tokens):
    return np.take_along_axis(log_softmax(logits[:, 1:]), tokens[:, 1:, None], axis=2)[..., 0]


def shifted_twice(logits, tokens):
    return logprobs(logits, np.roll(tokens, -1, axis=1))


def rows_shifted_as_one(logits, tokens):
    """Rows are packed behind each other; behind the last token of one comes the first of the next, and all of these
    are kept when the rows are cut apart again."""
    rows, width, vocabulary = logits.shape
    packed = logprobs(logits.reshape(1, -1, vocabulary), tokens.reshape(1, -1))
    return packed[0, : rows * (width - 1)].reshape(rows, width - 1)


def in_half_precision(logits, tokens):
    return logprobs(logits.astype(np.float16), tokens)


# --- entropies


def entropy(logits):
    return -expected(log_softmax(logits), log_softmax(logits))


def zero_times_infinity(logits):
    logp = log_softmax(logits)
    return -(np.exp(logp) * logp).sum(-1)


def entropy_upside_down(logits):
    return -entropy(logits)


# --- distillation


def mean_of(per_token, mask):
    return np.where(mask > 0, per_token, 0).sum() / max((mask > 0).sum(), 1)


def both(student_logits, teacher_logits, mask):
    on = mask[..., None] > 0
    return (log_softmax(np.where(on, z, 0)) for z in (student_logits, teacher_logits))


def forward_kl(student_logits, teacher_logits, mask):
    s, t = both(student_logits, teacher_logits, mask)
    return mean_of(expected(t, t - s), mask)


def reverse_kl(student_logits, teacher_logits, mask):
    s, t = both(student_logits, teacher_logits, mask)
    return mean_of(expected(s, s - t), mask)


def two_temperatures(student_logits, teacher_logits, mask):
    return reverse_kl(student_logits, teacher_logits / 0.9, mask)


def teacher_against_itself(student_logits, teacher_logits, mask):
    return forward_kl(teacher_logits, teacher_logits, mask)


def mean_over_the_vocabulary(student_logits, teacher_logits, mask):
    return forward_kl(student_logits, teacher_logits, mask) / student_logits.shape[-1]


def mean_over_every_element(student_logits, teacher_logits, mask):
    return reverse_kl(student_logits, teacher_logits, mask) / student_logits.shape[-1]


def logarithm_left_out(student_logits, teacher_logits, mask):
    s, t = both(student_logits, teacher_logits, mask)
    return mean_of(expected(t, t - np.exp(s)), mask)


def without_the_teachers_entropy(student_logits, teacher_logits, mask):
    s, t = both(student_logits, teacher_logits, mask)
    return mean_of(expected(t, -s), mask)


def divided_twice(student_logits, teacher_logits, mask):
    return forward_kl(student_logits, teacher_logits, mask) / max((mask > 0).sum(), 1)


def padded_vocabulary(student_logits, teacher_logits, mask):
    s, t = both(student_logits, teacher_logits, mask)
    return mean_of((np.exp(t) * (t - s)).sum(-1), mask)


def mixture(student_logits, teacher_logits, mask, beta):
    s, t = both(student_logits, teacher_logits, mask)
    m = np.logaddexp(t + np.log(beta), s + np.log1p(-beta))
    return mean_of(beta * expected(t, t - m) + (1 - beta) * expected(s, s - m), mask)


def vanishing_at_the_end(student_logits, teacher_logits, mask):
    return mixture(student_logits, teacher_logits, mask, 0.999)


def truncated(student_logits, teacher_logits, mask):
    """The terms of the token likeliest to the teacher (or of several), and of the others together."""
    s, t = both(student_logits, teacher_logits, mask)
    top = t == t.max(-1, keepdims=True)
    term = lambda t, s: np.where(np.exp(t) > 0, np.exp(t) * (t - s), 0)  # noqa: E731
    tail = lambda z: np.logaddexp.reduce(np.where(top, -np.inf, z), axis=-1)  # noqa: E731
    return np.where(top, term(t, s), 0).sum(-1), term(tail(t), tail(s))


def top_with_tail(student_logits, teacher_logits, mask):
    return mean_of(sum(truncated(student_logits, teacher_logits, mask)), mask)


def top_alone(student_logits, teacher_logits, mask):
    return mean_of(truncated(student_logits, teacher_logits, mask)[0], mask)


def jsd(student_logits, teacher_logits, mask, beta=0.5):
    return mixture(student_logits, teacher_logits, mask, beta)


def mixture_weights_swapped(student_logits, teacher_logits, mask, beta=0.5):
    """At 1/2 nobody can tell."""
    s, t = both(student_logits, teacher_logits, mask)
    m = np.logaddexp(s + np.log(beta), t + np.log1p(-beta))
    return mean_of(beta * expected(t, t - m) + (1 - beta) * expected(s, s - m), mask)


def top_clamped(student_logits, teacher_logits, mask):
    return mean_of(np.maximum(truncated(student_logits, teacher_logits, mask)[0], 0), mask)


# --- routers


def shares(router_probs, expert_index):
    """Of every expert, the share of the choices that are it."""
    return np.bincount(expert_index.ravel(), minlength=router_probs.shape[1]) / expert_index.size


def balance(router_probs, expert_index):
    return router_probs.shape[1] * (shares(router_probs, expert_index) * router_probs.mean(0)).sum()


def choices_not_divided(router_probs, expert_index):
    return balance(router_probs, expert_index) * expert_index.shape[1]


def scores_of_the_chosen(router_probs, expert_index):
    """[experts] shares meet [choices] scores: nothing of who was chosen is left."""
    scores = np.take_along_axis(router_probs, expert_index, axis=1).mean(0)
    return router_probs.shape[1] * (shares(router_probs, expert_index)[:, None] * scores).sum()


def probabilities_of_the_chosen(router_probs, expert_index):
    chosen = np.zeros_like(router_probs)
    np.put_along_axis(chosen, expert_index, 1.0, axis=1)
    return balance(router_probs * chosen, expert_index)


def jax_shares(router_probs, expert_index):
    return jax.nn.one_hot(expert_index, router_probs.shape[1]).mean((0, 1))


def reaches_the_router(router_probs, expert_index):
    return router_probs.shape[1] * jnp.sum(jax_shares(router_probs, expert_index) * router_probs.mean(0))


def never_reaches_the_router(router_probs, expert_index):
    return reaches_the_router(jax.lax.stop_gradient(router_probs), expert_index)


EXHIBITS = [
    Exhibit("Log-probabilities of training leave the temperature of sampling out.",
            "TRL #3029, #4159; OpenRLHF #853; NeMo #935",
            "logprobs", "temperature", temperature_left_out, logprobs, ("temperature",)),
    Exhibit("Log-probabilities of a nucleus beside those of the whole vocabulary.",
            "TRL #6789, #7269; prime-rl #2601",
            "logprobs", "normalised", over_the_nucleus, logprobs, ("temperature",)),
    Exhibit("Every logit is asked for its own token.", "trlX #509; macrocosm-os/pretraining #64",
            "logprobs", "definition", of_the_token_itself, logprobs, ("temperature",)),
    Exhibit("Labels are shifted twice.", "transformers #37830, #46897, #47394",
            "logprobs", "definition", shifted_twice, logprobs, ("temperature",)),
    Exhibit("Packed rows are shifted as one.", "verl #6475, #6564",
            "logprobs", "alignment", rows_shifted_as_one, logprobs, ("temperature",)),
    Exhibit("A softmax in half precision.", "OpenRLHF #634; optax #1020; xtuner #1108",
            "logprobs", "definition", in_half_precision, logprobs, ("temperature",)),
    Exhibit("0 * -inf in p log p.", "TRL #7221; SkyRL #2259",
            "entropy", "vocabulary_padding", zero_times_infinity, entropy),
    Exhibit("The entropy has the wrong sign.", "stable-baselines3 #127; garage #628",
            "entropy", "bounds", entropy_upside_down, entropy),
    Exhibit("Policy and reference at two temperatures.", "google-tunix 0.1.7, rl_cluster",
            "distillation", "zero_at_equality", two_temperatures, reverse_kl, ("reverse_kl",)),
    Exhibit("A vocabulary padded with -inf.", "TRL 1.16, gkd",
            "distillation", "vocabulary_padding", padded_vocabulary, forward_kl, ("forward_kl",)),
    Exhibit("The generalised JSD vanishes as beta goes to 1, where the reverse KL is meant.",
            "TRL #6780; ms-swift #10078; verl-recipe #151",
            "distillation", "reverse_kl", vanishing_at_the_end, reverse_kl, ("reverse_kl",)),
    Exhibit("The weights of the mixture are swapped.", "TRL #3043",
            "distillation", "generalised_jsd", mixture_weights_swapped, jsd, ("generalised_jsd",)),
    Exhibit("The likeliest token alone is no distribution.", "verl #7856, #7855",
            "distillation", "zero_at_equality", top_alone, top_with_tail),
    Exhibit("Clamped at 0, a truncated KL is blind on half the side.", "verl #7806",
            "distillation", "positive_apart", top_clamped, top_with_tail),
    Exhibit("The teacher is compared with itself.",
            "labmlai/annotated_deep_learning_paper_implementations #66",
            "distillation", "positive_apart", teacher_against_itself, forward_kl, ("forward_kl",)),
    Exhibit("The other direction than the one that is meant.", "paiml/aprender #2153",
            "distillation", "forward_kl", reverse_kl, forward_kl, ("forward_kl",)),
    Exhibit("A mean over the vocabulary too.", "deit #61; HikariTJU/LD #74",
            "distillation", "forward_kl", mean_over_the_vocabulary, forward_kl, ("forward_kl",)),
    Exhibit("The divergence of one token becomes smaller as the vocabulary grows.",
            "Teacher-free-Knowledge-Distillation #41; attention-transfer #18; pytorch #6622",
            "distillation", "vocabulary_duplication", mean_over_every_element, reverse_kl,
            ("vocabulary_duplication",)),
    Exhibit("kl_div is given the student's probabilities, not their logarithms.", "ProDA #20, #43",
            "distillation", "zero_at_equality", logarithm_left_out, forward_kl, ("forward_kl",)),
    Exhibit("The teacher's entropy is left out.", "distillm #7",
            "distillation", "zero_at_equality", without_the_teachers_entropy, forward_kl, ("forward_kl",)),
    Exhibit("The tokens divide twice.", "easydistill #16",
            "distillation", "duplication", divided_twice, forward_kl, ("forward_kl",)),
    Exhibit("The shares of k choices add up to k.", "transformers #43688, #43775",
            "router_balance", "one_at_balance", choices_not_divided, balance, ("one_at_balance",)),
    Exhibit("A broadcast in place of a sum over the chosen.", "mindspore-ai/hyper-parallel #752",
            "router_balance", "one_at_balance", scores_of_the_chosen, balance, ("one_at_balance",)),
    Exhibit("Probabilities of the chosen experts alone.", "paiml/aprender #2162",
            "router_balance", "one_at_balance", probabilities_of_the_chosen, balance, ("one_at_balance",)),
    Exhibit("The gradient never reaches the router.", "NeMo Automodel #1408",
            "router_balance", "reaches_probabilities", never_reaches_the_router, reaches_the_router,
            framework="jax"),
]
