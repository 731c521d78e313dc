"""Preference objectives: one row each. The formula of a row is printed by `jaxpt describe NAME`.

Online and iterative DPO are any of these rows on pairs that pairs.best_and_worst takes from groups of samples.
Domains: beta, tau, lam, eta > 0; 0 <= label_smoothing <= 1, for robust_dpo < 1/2, for exo strictly inside.
"""

from jaxpt.objectives.preference_algebra import compose

LOG2 = "log2_at_margin_0"  # where policy and reference agree
MONOTONE = "monotone"  # falls as the chosen response rises and as the rejected one falls, everywhere
LENGTH = "length_normalised"  # repeating every token changes nothing
SWAP = "swap_symmetric"  # at label_smoothing 1/2 chosen and rejected are the same

DPO = compose(
    "dpo",
    "Rafailov et al. 2023, arXiv 2305.18290, eq. 7; beta of appendix B",
    link="logistic", hyper={"beta": 0.1}, claims=(LOG2, MONOTONE),
)

DPO_NORM = compose(
    "dpo_norm",
    "Lambert et al. 2024, arXiv 2411.15124, eq. 6: length-normalised DPO; beta of their run tulu-3-8b-dpo",
    score="mean", link="logistic", hyper={"beta": 5.0}, claims=(LOG2, MONOTONE, LENGTH),
)

CDPO = compose(
    "cdpo",
    "Mitchell 2023, A note on DPO with noisy preferences and relationship to IPO, eq. 3: conservative DPO; the rate of "
    "flips is the data's, 0.1 is ours",
    link="conservative", hyper={"beta": 0.1, "label_smoothing": 0.1}, claims=(LOG2, SWAP),
)

ROBUST_DPO = compose(
    "robust_dpo",
    "Chowdhury, Kini, Natarajan 2024, arXiv 2403.00409, eq. 12; the rate of flips of section 6, beta of DPO",
    link="robust", hyper={"beta": 0.1, "label_smoothing": 0.1}, claims=(LOG2, MONOTONE),
)

FDPO = "Wang et al. 2023, arXiv 2309.16240, theorem 1 and table 1: f-DPO, "
FDPO_FORWARD_KL = compose(
    "fdpo_forward_kl", FDPO + "forward KL",
    shape="forward_kl", link="logistic", hyper={"beta": 0.1}, claims=(LOG2, MONOTONE),
)
FDPO_JS = compose(
    "fdpo_js", FDPO + "Jensen-Shannon",
    shape="js", link="logistic", hyper={"beta": 0.1}, claims=(LOG2, MONOTONE),
)
FDPO_ALPHA = compose(
    "fdpo_alpha", FDPO + "alpha divergence (TRL's coefficient is 1 - alpha)",
    shape="alpha", link="logistic", hyper={"beta": 0.1, "alpha": 0.5}, claims=(LOG2, MONOTONE),
)

LD_DPO = compose(
    "ld_dpo",
    "Liu et al. 2024, arXiv 2409.06411, eq. 10-12; ld_alpha is tuned per model there",
    score="length_desensitised", link="logistic", hyper={"beta": 0.1, "ld_alpha": 0.5}, claims=(LOG2, MONOTONE),
)

WPO = compose(
    "wpo",
    "Zhou et al. 2024, arXiv 2406.11827, eq. 2, with sampled alignment of the weights; beta of the authors' code",
    link="logistic", weight="aligned_confidence", hyper={"beta": 0.01}, claims=(MONOTONE,),
)
WPO_UNALIGNED = compose(
    "wpo_unaligned",
    "Zhou et al. 2024, arXiv 2406.11827, eq. 2, without alignment of the weights; beta of the authors' code",
    link="logistic", weight="confidence", hyper={"beta": 0.01}, claims=(MONOTONE,),
)

RPO = compose(
    "rpo",
    "Pang et al. 2024, arXiv 2404.19733, eq. 1-2: iterative reasoning preference optimization, DPO and the likelihood "
    "of the chosen response over its length, on pairs of the policy's own samples",
    link="logistic", term="nll_mean", hyper={"beta": 0.1, "nll_coef": 1.0}, claims=(MONOTONE,),
)

DPOP = compose(
    "dpop",
    "Pal et al. 2024, arXiv 2402.13228, eq. 3: DPO-Positive",
    link="positive_logistic", hyper={"beta": 0.3, "lam": 50.0}, claims=(LOG2, MONOTONE),
)

SLIC = compose(
    "slic",
    "Zhao et al. 2023, arXiv 2305.10425, eq. 1: calibration hinge and likelihood; the chosen response stands for the "
    "target of the likelihood, and delta = nll_coef = 1 (tuned there)",
    reference="none", link="margin_hinge", term="nll_sum", hyper={"delta": 1.0, "nll_coef": 1.0}, claims=(MONOTONE,),
)

RSO_HINGE = compose(
    "rso_hinge",
    "Liu et al. 2023, arXiv 2309.06657, section 3.3: hinge-norm; beta is the paper's gamma",
    link="hinge", hyper={"beta": 0.05}, claims=(MONOTONE,),
)

IPO = compose(
    "ipo",
    "Azar et al. 2023, arXiv 2310.12036, eq. 17, with scores over the response's length, as its authors run it",
    score="mean", link="squared", hyper={"tau": 0.1}, claims=(LENGTH,),
)
IPO_SUM = compose(
    "ipo_sum",
    "Azar et al. 2023, arXiv 2310.12036, eq. 17, with sums of log-probabilities, as it is printed",
    link="squared", hyper={"tau": 0.1},
)

ORPO = compose(
    "orpo",
    "Hong, Lee, Thorne 2024, arXiv 2403.07691, eq. 6-7: likelihood and odds ratio of mean token probabilities",
    score="mean", reference="none", shape="odds", link="weighted_logistic", term="nll_mean",
    hyper={"lam": 0.1, "nll_coef": 1.0}, claims=(MONOTONE, LENGTH),
)

SIMPO = compose(
    "simpo",
    "Meng, Xia, Chen 2024, arXiv 2405.14734, eq. 6, without likelihood; constants of Llama-3-Base (table 8)",
    score="mean", reference="none", link="shifted_logistic", hyper={"beta": 2.0, "gamma": 1.0}, claims=(MONOTONE, LENGTH),
)

ALPHA_PO = compose(
    "alpha_po",
    "Gupta et al. 2025, arXiv 2501.03884: SimPO with the alpha reward; constants are tuned per model there, these are of "
    "Mistral-Instruct (table 3) as TRL's documentation reads them",
    score="mean", reference="none", shape="alpha", link="shifted_logistic",
    hyper={"beta": 2.5, "gamma": 0.1, "alpha": 0.25}, claims=(MONOTONE, LENGTH),
)

CPO = compose(
    "cpo",
    "Xu et al. 2024, arXiv 2401.08417, eq. 3-4: no reference, and the likelihood of the chosen response",
    reference="none", link="logistic", term="nll_sum", hyper={"beta": 0.1, "nll_coef": 1.0}, claims=(MONOTONE,),
)

SPPO = compose(
    "sppo",
    "Wu et al. 2024, arXiv 2405.00675, eq. 4.7 with win rates 1 and 0 (the hard form); eta is 1/beta elsewhere",
    link="squared_each", hyper={"eta": 1000.0},
)

NCA = compose(
    "nca",
    "Chen et al. 2024, arXiv 2402.05369, section 4.1, for pairs; beta is the paper's alpha",
    link="nca", hyper={"beta": 0.01},
)

EXO = compose(
    "exo",
    "Ji et al. 2024, arXiv 2402.00856, eq. 16: reverse KL to the preference, K = 2, with smoothed labels; "
    "beta of appendix B, the smoothing TRL recommends (e^-10 in the authors' code)",
    link="exo", hyper={"beta": 0.1, "label_smoothing": 0.001}, claims=(SWAP,),
)

BCO_PAIR = compose(
    "bco_pair",
    "Jung et al. 2024, arXiv 2404.04656, theorem 1: binary cross-entropy of pairs, no reward shift (bco has it)",
    link="classifier", hyper={"beta": 0.01}, claims=(MONOTONE,),
)

AOT = compose(
    "aot",
    "Melnyk et al. 2024, arXiv 2406.05882, section 3, paired: quantiles over the whole batch, logistic penalty",
    margin="quantile", link="conservative", hyper={"beta": 0.1, "label_smoothing": 0.0}, claims=(LOG2, SWAP),
)
AOT_UNPAIRED = compose(
    "aot_unpaired",
    "Melnyk et al. 2024, arXiv 2406.05882, section 3, unpaired: quantiles over the whole batch, logistic penalty",
    margin="quantile_unpaired", link="conservative", hyper={"beta": 0.1, "label_smoothing": 0.0}, claims=(LOG2, SWAP),
)

APO_ZERO = compose(
    "apo_zero",
    "D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 7; beta of section 5.2",
    link="apo_zero", hyper={"beta": 0.1}, claims=(MONOTONE,),
)
APO_DOWN = compose(
    "apo_down",
    "D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 8; beta of section 5.2",
    link="apo_down", hyper={"beta": 0.1},
)

DISCOPOP = compose(
    "discopop",
    "Lu et al. 2024, arXiv 2406.08414, eq. 5: log-ratio modulated loss",
    link="discopop", hyper={"beta": 0.05, "tau": 0.05},
)

ROWS = (
    DPO, DPO_NORM, CDPO, ROBUST_DPO, FDPO_FORWARD_KL, FDPO_JS, FDPO_ALPHA, LD_DPO, WPO, WPO_UNALIGNED, RPO, DPOP,
    SLIC, RSO_HINGE, IPO, IPO_SUM, ORPO, SIMPO, ALPHA_PO, CPO, SPPO, NCA, EXO, BCO_PAIR, AOT, AOT_UNPAIRED, APO_ZERO,
    APO_DOWN, DISCOPOP,
)
