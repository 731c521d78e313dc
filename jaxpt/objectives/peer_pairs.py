"""Other libraries' preference, reward and distillation objectives, as peers.py: one row each, LIBRARY.name.

Most are one of ours under the library's name (alias_of says which), or with the library's constants. All of them count
a pair whose response has no token, at a constant loss; here it is left out.
"""

from jaxpt.objectives import distillation, preference, reward, supervised, unpaired
from jaxpt.objectives.peers import OPENRLHF, TRL, TUNIX, same
from jaxpt.objectives.preference_algebra import compose
from jaxpt.objectives.row import Row

OTHERS = {row.name: row for table in (distillation, reward, supervised, unpaired) for row in table.ROWS}
DPO_AT = TRL + "trainer/dpo_trainer.py:"

TRL_SIGMOID = same("trl.sigmoid", preference.DPO, DPO_AT + "1389, loss_type sigmoid")
TRL_IPO = same("trl.ipo", preference.IPO, DPO_AT + "1395, loss_type ipo")
TRL_EXO = same(
    "trl.exo_pair", preference.EXO, DPO_AT + "1406, loss_type exo_pair with a label_smoothing (here 0.001; its default is 0)"
)
TRL_AOT = same("trl.aot", preference.AOT, DPO_AT + "1449, loss_type aot")
TRL_AOT_UNPAIRED = same("trl.aot_unpaired", preference.AOT_UNPAIRED, DPO_AT + "1461, loss_type aot_unpaired")
TRL_APO_ZERO = same("trl.apo_zero", preference.APO_ZERO, DPO_AT + "1470, loss_type apo_zero")
TRL_APO_DOWN = same("trl.apo_down", preference.APO_DOWN, DPO_AT + "1478, loss_type apo_down")
TRL_ROBUST = same(
    "trl.robust", preference.ROBUST_DPO, DPO_AT + "1428, loss_type robust with a label_smoothing (here 0.1; its default is 0)"
)
TRL_HINGE = compose("trl.hinge", DPO_AT + "1392, loss_type hinge", link="hinge", hyper={"beta": 0.1})
TRL_NCA = compose("trl.nca_pair", DPO_AT + "1419, loss_type nca_pair", link="nca", hyper={"beta": 0.1})
TRL_BCO = compose("trl.bco_pair", DPO_AT + "1433, loss_type bco_pair", link="classifier", hyper={"beta": 0.1})
TRL_SPPO = compose(
    "trl.sppo_hard", DPO_AT + "1438, loss_type sppo_hard; eta is 1/beta", link="squared_each", hyper={"eta": 10.0}
)
TRL_DISCOPOP = compose(
    "trl.discopop", DPO_AT + "1486, loss_type discopop", link="discopop", hyper={"beta": 0.1, "tau": 0.05}
)
TRL_NORM = compose(
    "trl.sigmoid_norm", DPO_AT + "1510, loss_type sigmoid_norm", score="mean", link="logistic", hyper={"beta": 0.1}
)
TRL_FORWARD = same("trl.dpo_forward_kl", preference.FDPO_FORWARD_KL, DPO_AT + "1355, f_divergence_type forward_kl")
TRL_JS = same("trl.dpo_js_divergence", preference.FDPO_JS, DPO_AT + "1359, f_divergence_type js_divergence")
TRL_ALPHA = same(
    "trl.dpo_alpha_divergence", preference.FDPO_ALPHA,
    DPO_AT + "1363, f_divergence_type alpha_divergence; alpha is 1 - its coefficient",
)
TRL_LD = same("trl.ld_dpo", preference.LD_DPO, DPO_AT + "1289, with an ld_alpha (here 0.5; it has no default)")
TRL_WPO = compose(
    "trl.wpo", DPO_AT + "1519, use_weighting", link="logistic", weight="aligned_confidence", hyper={"beta": 0.1}
)

CPO_AT = TRL + "experimental/cpo/cpo_trainer.py:"
TRL_CPO = compose(
    "trl.cpo", CPO_AT + "729 and 806, loss_type sigmoid, likelihood by tokens of the batch", reference="none", link="logistic",
    term="nll_tokens", hyper={"beta": 0.1, "nll_coef": 1.0},
)
TRL_SIMPO = compose(
    "trl.simpo", CPO_AT + "720 and 806, loss_type simpo, with the likelihood that its cpo_alpha adds unless it is 0", score="mean",
    reference="none", link="shifted_logistic", term="nll_tokens", hyper={"beta": 0.1, "gamma": 0.5, "nll_coef": 1.0},
)
TRL_CPO_HINGE = compose(
    "trl.cpo_hinge", CPO_AT + "735, loss_type hinge", reference="none", link="hinge", term="nll_tokens",
    hyper={"beta": 0.1, "nll_coef": 1.0},
)
TRL_CPO_IPO = compose(
    "trl.cpo_ipo", CPO_AT + "737, loss_type ipo: over the responses' lengths, without a reference", score="mean", reference="none",
    link="squared", term="nll_tokens", hyper={"tau": 0.1, "nll_coef": 1.0},
)
TRL_ORPO = compose(
    "trl.orpo", TRL + "experimental/orpo/orpo_trainer.py:670 and 805; its likelihood is that of prompt and response", score="mean",
    reference="none", shape="odds", link="weighted_logistic", term="nll_tokens", hyper={"lam": 0.1, "nll_coef": 1.0},
)
TRL_KTO = same("trl.kto", OTHERS["kto"], TRL + "trainer/kto_trainer.py:1443, loss_type kto")
TRL_REWARD = same("trl.reward", OTHERS["bradley_terry"], TRL + "trainer/reward_trainer.py:793")
TRL_MARGIN = same("trl.reward_margin", OTHERS["bradley_terry_margin"], TRL + "trainer/reward_trainer.py:791")
TRL_CENTRED = same(
    "trl.reward_centred", OTHERS["bradley_terry_centred"],
    TRL + "trainer/reward_trainer.py:796, with a center_rewards_coefficient (here 0.01; it has no default)",
)
TRL_GKD = same("trl.gkd", OTHERS["jsd"], TRL + "experimental/gkd/gkd_trainer.py:238; at a beta of 0 or 1 it becomes a KL")

OPENRLHF_AT = OPENRLHF + "models/loss.py:"
OPENRLHF_DPO = same("openrlhf.dpo", preference.DPO, OPENRLHF_AT + "340")
OPENRLHF_CDPO = same("openrlhf.cdpo", preference.CDPO, OPENRLHF_AT + "345, with a label_smoothing (here 0.1; its default is 0)")
OPENRLHF_IPO = same("openrlhf.ipo", preference.IPO_SUM, OPENRLHF_AT + "342, ipo")
OPENRLHF_PAIR = same("openrlhf.pairwise", OTHERS["bradley_terry"], OPENRLHF_AT + "301")
OPENRLHF_LOGEXP = same("openrlhf.logexp", OTHERS["bradley_terry"], OPENRLHF_AT + "316, which overflows at gaps of 89")

TUNIX_AT = TUNIX + "sft/dpo/dpo_trainer.py:"
TUNIX_DPO = same("tunix.dpo", preference.DPO, TUNIX_AT + "470")
TUNIX_ORPO = compose(
    "tunix.orpo", TUNIX_AT + "420, orpo: odds of whole responses, not of mean tokens", reference="none", shape="odds",
    link="weighted_logistic", term="nll_mean", hyper={"lam": 0.1, "nll_coef": 1.0},
)
TUNIX_LOGIT = same("tunix.logit", OTHERS["kd"], TUNIX + "distillation/strategies/logit.py:92, at alpha 1: without its task loss")

OPTAX = "optax 0.2.8, "
OPTAX_CE = same("optax.softmax_cross_entropy", OTHERS["cross_entropy"], OPTAX + "losses/_classification.py:299, meaned over tokens")
OPTAX_KL = same("optax.kl_divergence", OTHERS["forward_kl"], OPTAX + "losses/_classification.py:566, meaned over tokens")

ROWS: tuple[Row, ...] = (
    TRL_SIGMOID, TRL_IPO, TRL_EXO, TRL_AOT, TRL_AOT_UNPAIRED, TRL_APO_ZERO, TRL_APO_DOWN, TRL_ROBUST, TRL_HINGE, TRL_NCA,
    TRL_BCO, TRL_SPPO, TRL_DISCOPOP, TRL_NORM, TRL_FORWARD, TRL_JS, TRL_ALPHA, TRL_LD,
    TRL_WPO, TRL_CPO, TRL_SIMPO, TRL_CPO_HINGE, TRL_CPO_IPO, TRL_ORPO, TRL_KTO, TRL_REWARD, TRL_MARGIN, TRL_CENTRED, TRL_GKD,
    OPENRLHF_DPO, OPENRLHF_CDPO, OPENRLHF_IPO, OPENRLHF_PAIR, OPENRLHF_LOGEXP, TUNIX_DPO, TUNIX_ORPO, TUNIX_LOGIT, OPTAX_CE,
    OPTAX_KL,
)
