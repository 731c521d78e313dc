"""Laws around training and after it: learning rate and batch size, tasks from loss, test-time compute, and
optimisation against a reward model."""

import numpy as np

from jaxpt.scaling.either import exp, log, log10, log_rise, maximum, power, sqrt, stack
from jaxpt.scaling.laws import Law, middle, span
from jaxpt.scaling.laws_dense import KAPLAN

STEP = "Li et al. 2025 (Step Law), arXiv 2503.04715"
DEEPSEEK = "Bi et al. 2024 (DeepSeek LLM), arXiv 2401.02954, eq. 1"
GAO = "Gao et al. 2022, arXiv 2210.10760, section 3.1"


def critical_batch(L, *, B_star, alpha_B):
    return B_star * power(L, -1 / alpha_B)


def _critical_batch(u, y, L):
    alpha = span(u[0], 0.05, 1.0)
    return middle(y) * middle(L) ** (1 / alpha), alpha


def steps_of_batch(B, *, S_min, B_crit):
    return S_min * (1 + B_crit / B)


def _steps_of_batch(u, y, B):
    S_min = y.min() * span(u[0], 0.01, 1.0)
    return S_min, middle(B) * np.maximum(middle(y) / S_min - 1, 1e-3)


def power_nd(N, D, *, c, alpha, beta):
    return c * power(N, alpha) * power(D, beta)


def _power_nd(u, y, N, D):
    alpha, beta = 2 * u[0] - 1, 2 * u[1] - 1
    return middle(y) / middle(N) ** alpha / middle(D) ** beta, alpha, beta


def power_d(D, *, c, beta):
    return c * power(D, beta)


def power_c(C, *, c, beta):
    return c * power(C, beta)


def _power(u, y, x):
    beta = 2 * u[0] - 1
    return middle(y) / middle(x) ** beta, beta


def task_sigmoid(L, *, a, b, k, L_0):
    return b + a / (1 + exp(k * (L - L_0)))


def _task_sigmoid(u, y, L):
    high, low = y.max() + np.ptp(y) * (u[0] ** 2), y.min() - np.ptp(y) * (u[1] ** 2)
    return high - low, low, span(u[2], 0.3, 30.0) / max(np.ptp(L), 1e-9), span(u[3], L.min() / 1.2, L.max() * 1.2)


def task_error(L, *, epsilon, k, gamma):
    return epsilon - k * exp(-gamma * L)


def _task_error(u, y, L):
    epsilon, gamma = y.max() + np.ptp(y) * span(u[0], 0.01, 3.0), span(u[1], 0.05, 10.0) / max(np.ptp(L), 1e-9)
    return epsilon, (epsilon - y.mean()) * np.exp(gamma * L.mean()), gamma


def log_linear(T, *, a, b):
    return a + b * log10(T)


def _log_linear(u, y, T):
    slope = np.ptp(y) / max(np.ptp(np.log10(T)), 1e-9) * (4 * u[0] - 2)
    return y.mean() - slope * np.log10(middle(T)), slope


def coverage(k, *, a, b):
    return exp(-a * power(k, -b))


def _coverage(u, y, k):
    b = span(u[0], 0.02, 2.0)
    return -np.log(np.clip(y.mean(), 1e-6, 1 - 1e-6)) * middle(k) ** b, b


def beta_binomial(k, *, alpha, beta):
    """Problems are solved with probability p ~ Beta(alpha, beta): 1 - E (1 - p)^k = 1 - B(alpha, beta + k) /
    B(alpha, beta), whose complement falls as k^-alpha."""
    none, more = log_rise(stack(beta + 0 * k, beta + k), alpha)
    return 1 - exp(none - more)


def _beta_binomial(u, y, k):
    return span(u[0], 0.03, 5.0), span(u[1], 0.3, 1000.0)


def overoptimisation_bon(KL, *, alpha, beta):
    d = sqrt(KL)
    return d * (alpha - beta * d)


def overoptimisation_rl(KL, *, alpha, beta):
    d = sqrt(KL)
    return d * (alpha - beta * log(maximum(d, 1e-300)))


def _overoptimisation(u, y, KL):
    size = np.abs(y).max() / max(np.sqrt(KL).max(), 1e-9)
    return 4 * size * (2 * u[0] - 0.5), size * (2 * u[1] - 0.5)


ROWS = (
    Law("critical_batch", KAPLAN + "1.4", "B(L) = B_star / L^(1 / alpha_B), in tokens", critical_batch, _critical_batch,
        (2e8, 0.21), output="batch"),
    Law("steps_of_batch", "McCandlish et al. 2018, arXiv 1812.06162, eq. 2.11", "S(B) = S_min (1 + B_crit / B)",
        steps_of_batch, _steps_of_batch, (5e3, 1e6), output="steps"),
    Law("step_lr", STEP, "lr(N, D) = c N^alpha D^beta", power_nd, _power_nd, (1.79, -0.713, 0.307), output="lr",
        real=("alpha", "beta")),
    Law("step_batch", STEP, "B(D) = c D^beta, in tokens", power_d, _power, (0.58, 0.571), output="batch",
        real=("beta",)),
    Law("deepseek_lr", DEEPSEEK, "lr(C) = c C^beta", power_c, _power, (0.3118, -0.125), output="lr", real=("beta",)),
    Law("deepseek_batch", DEEPSEEK, "B(C) = c C^beta, in tokens", power_c, _power, (0.2920, 0.3271), output="batch",
        real=("beta",)),
    Law("task_sigmoid", "Bhagia et al. 2024, arXiv 2412.04403, section 3", "accuracy(L) = b + a / (1 + exp(k (L - L_0)))",
        task_sigmoid, _task_sigmoid, (0.7, 0.25, 4.0, 2.6), output="accuracy", residual="raw", real=("b",)),
    Law("task_error", "Gadre et al. 2024, arXiv 2403.08540, eq. 5", "error(L) = epsilon - k exp(-gamma L)", task_error,
        _task_error, (0.85, 2.08, 0.756), output="error", residual="raw"),
    Law("log_linear", "accuracy against the logarithm of test-time tokens, as in OpenAI 2024, Learning to reason with "
        "LLMs", "accuracy(T) = a + b log10 T", log_linear, _log_linear, (-0.1, 0.15), output="accuracy", residual="raw",
        real=("a", "b")),
    Law("coverage", "Brown et al. 2024, arXiv 2407.21787, section 3", "pass@k = exp(-a / k^b)", coverage, _coverage,
        (2.3, 0.4), output="coverage", residual="raw"),
    Law("beta_binomial", "Schaeffer et al. 2025, arXiv 2502.17578", "pass@k = 1 - B(alpha, beta + k) / B(alpha, beta)",
        beta_binomial, _beta_binomial, (0.35, 6.0), output="coverage", residual="raw"),
    Law("overoptimisation_bon", GAO, "R(KL) = d (alpha - beta d), d = sqrt(KL)", overoptimisation_bon,
        _overoptimisation, (0.5, 0.05), output="reward", residual="raw", real=("alpha", "beta"), nonnegative=("KL",)),
    Law("overoptimisation_rl", GAO, "R(KL) = d (alpha - beta log d), d = sqrt(KL)", overoptimisation_rl,
        _overoptimisation, (1.0, 0.3), output="reward", residual="raw", real=("alpha", "beta"), nonnegative=("KL",)),
)
