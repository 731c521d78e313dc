"""Estimators of a KL on tokens of the policy."""

import jax.numpy as jnp
import numpy as np
from exhibit import Exhibit


def k1(logp, ref_logp):
    return logp - ref_logp


def k2(logp, ref_logp):
    return (logp - ref_logp) ** 2 / 2


def k3(logp, ref_logp):
    d = np.clip(ref_logp - logp, -20, 20)
    return np.expm1(d) - d


def k3_clamped(logp, ref_logp):
    return np.clip(k3(logp, ref_logp), -10, 10)


def exp_then_clip(logp, ref_logp):
    d = ref_logp - logp
    return jnp.minimum(jnp.exp(d) - d - 1, 1e4)


def clip_then_exp(logp, ref_logp):
    """Behind a log-ratio of 10 the curve goes on as its tangent does."""
    d = ref_logp - logp
    near = jnp.minimum(d, 10.0)
    return jnp.expm1(near) + jnp.exp(near) * (d - near) - d


def k2_off_policy(logp, ref_logp, old_logp):
    """The tokens are of an older policy, which is not asked."""
    return k2(logp, ref_logp)


def k3_by_the_ratio(logp, ref_logp, old_logp):
    return np.exp(np.clip(logp - old_logp, -20, 20)) * k3(logp, ref_logp)


EXHIBITS = [
    Exhibit("k3 in the loss has the gradient of the other direction's KL.",
            "TRL #4967, #6503; verl #2953; slime #1004; OpenRLHF #1101",
            "kl", "gradient_of_kl", k3, k2, ("gradient_of_kl",)),
    Exhibit("k1 in the loss has a gradient of 0 on average.",
            "open-instruct #534; google-tunix 0.1.7, kl_loss_mode",
            "kl", "gradient_of_kl", k1, k2, ("gradient_of_kl",)),
    Exhibit("Off-policy, k2 pulls without the importance ratio.", "OpenRLHF #1309; prime-rl #1391",
            "kl", "gradient_of_kl_off_policy", k2_off_policy, k3_by_the_ratio, ("gradient_of_kl_off_policy",)),
    Exhibit("Clamped at 10, k3 has no gradient where the policy has left the reference.",
            "verl 0.9.1, SkyRL 0.4.0, OpenRLHF 0.11.2",
            "kl", "no_clamp", k3_clamped, k3, ("no_clamp", "unbiased")),
    Exhibit("exp overflows before the clip: NaN in the gradient.",
            "OpenRLHF #1160, #1335; TRL #3015; prime-rl #1329",
            "kl", "no_nan", exp_then_clip, clip_then_exp, framework="jax"),
]
