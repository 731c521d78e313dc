"""Laws of the pre-training loss of dense models: parameters N, tokens D, unique tokens U, steps S, FLOPs C."""

import numpy as np

from jaxpt.scaling.either import exp, log, logaddexp, maximum, minimum, power, where
from jaxpt.scaling.laws import Law, floor_and_shares, middle, span

KAPLAN = "Kaplan et al. 2020, arXiv 2001.08361, eq. "
MUENNIGHOFF = "Muennighoff et al. 2023, arXiv 2305.16264, section 3.1"


def kaplan_n(N, *, N_c, alpha_N):
    return power(N_c / N, alpha_N)


def kaplan_d(D, *, D_c, alpha_D):
    return power(D_c / D, alpha_D)


def kaplan_c(C, *, C_c, alpha_C):
    return power(C_c / C, alpha_C)


def _through_the_middle(u, y, x):
    exponent = span(u[0], 0.02, 1.0)
    return middle(x) * middle(y) ** (1 / exponent), exponent


def kaplan_nd(N, D, *, N_c, D_c, alpha_N, alpha_D):
    return power(power(N_c / N, alpha_N / alpha_D) + D_c / D, alpha_D)


def _kaplan_nd(u, y, N, D):
    alpha_N, alpha_D, whole = span(u[0], 0.03, 0.6), span(u[1], 0.03, 0.6), middle(y)
    from_N, from_D = u[2] * whole ** (1 / alpha_D), (1 - u[2]) * whole ** (1 / alpha_D)
    return middle(N) * from_N ** (alpha_D / alpha_N), middle(D) * from_D, alpha_N, alpha_D


def kaplan_ns(N, S, *, N_c, S_c, alpha_N, alpha_S):
    return power(N_c / N, alpha_N) + power(S_c / S, alpha_S)


def _kaplan_ns(u, y, N, S):
    alpha_N, alpha_S, whole = span(u[0], 0.03, 1.0), span(u[1], 0.1, 1.5), middle(y)
    return (middle(N) * (u[2] * whole) ** (1 / alpha_N), middle(S) * ((1 - u[2]) * whole) ** (1 / alpha_S),
            alpha_N, alpha_S)


def chinchilla(N, D, *, A, B, E, alpha, beta):
    return E + A * power(N, -alpha) + B * power(D, -beta)


def _chinchilla(u, y, N, D):
    E, (from_N, from_D) = floor_and_shares(u, y, 2)
    alpha, beta = span(u[3], 0.05, 1.5), span(u[4], 0.05, 1.5)
    return from_N * middle(N) ** alpha, from_D * middle(D) ** beta, E, alpha, beta


def chinchilla_tied(N, D, *, A, B, E, alpha):
    return chinchilla(N, D, A=A, B=B, E=E, alpha=alpha, beta=alpha)


def _chinchilla_tied(u, y, N, D):
    A, B, E, alpha, _ = _chinchilla(u[[0, 1, 2, 3, 3]], y, N, D)
    return A, B, E, alpha


def envelope(C, *, E, A, alpha):
    return E + A * power(C, -alpha)


def _envelope(u, y, C):
    E, (excess,) = floor_and_shares(u, y, 1)
    alpha = span(u[2], 0.02, 1.5)
    return E, excess * middle(C) ** alpha, alpha


def overtraining(N, D, *, E, a, b, eta):
    """With C = 6 N D and M = D / N: under alpha = beta Chinchilla's law is this one."""
    M = D / N
    return E + (a * power(M, eta) + b * power(M, -eta)) * power(6 * N * D, -eta)


def _overtraining(u, y, N, D):
    E, (up, down) = floor_and_shares(u, y, 2)
    eta, C, M = span(u[3], 0.02, 0.7), 6 * middle(N) * middle(D), middle(D) / middle(N)
    return E, up * C**eta * M**-eta, down * C**eta * M**eta, eta


def data_constrained(N, D, U, *, A, B, E, alpha, beta, R_D, R_N):
    """Tokens beyond the U unique ones, and parameters beyond those that U tokens are the best match of, count
    less and less."""
    unique = log(minimum(U, D))
    G = (log(alpha * A) - log(beta * B)) / (alpha + beta)  # its logarithm
    suits = beta / alpha * (unique + G) + G
    base = where(suits < log(N), suits, log(N))
    return E + A * exp(-alpha * _worth(base, log(N), R_N)) + B * exp(-beta * _worth(unique, log(D), R_D))


def _worth(base, x, R):
    """log (u (1 + R (1 - exp(-(x / u - 1) / R)))) from log u and log x."""
    return base + log(1 + R * (1 - exp((1 - exp(x - base)) / R)))


def _data_constrained(u, y, N, D, U):
    return *_chinchilla(u, y, N, D), span(u[5], 2.0, 50.0), span(u[6], 2.0, 50.0)


def data_penalty(N, D, U, *, A, B, E, alpha, beta, P):
    return chinchilla(N, D, A=A, B=B, E=E, alpha=alpha, beta=beta) + P * maximum(D / U - 1, 0.0) * N / U


def _data_penalty(u, y, N, D, U):
    repeated = np.maximum(D / U - 1, 0.0) * N / U
    return *_chinchilla(u, y, N, D), span(u[5], 1e-4, 1.0) * middle(y) / max(float(repeated.mean()), 1e-12)


def data_saturating(N, D, U, *, E, L_0, a, b, c, alpha, beta, gamma, delta):
    """From E to L_0, the loss of a model that knows nothing; D tokens seen, U of them different."""
    h = a * power(N, -alpha) + b * power(D, -beta) + c * power(N, gamma) * power(U, -delta)
    return E + (L_0 - E) * h / (1 + h)


def _data_saturating(u, y, N, D, U):
    E, shares = floor_and_shares(u, y, 3)
    L_0, alpha, beta, gamma, delta = y.max() * span(u[4], 1.05, 3.0), *(span(u[i], 0.1, 1.0) for i in (5, 6, 7, 8))
    a, b, c = shares / shares.sum(axis=0) * (middle(y) - E) / (L_0 - middle(y))
    return (E, L_0, a * middle(N) ** alpha, b * middle(D) ** beta, c * middle(U) ** delta / middle(N) ** gamma, alpha,
            beta, gamma, delta)


def farseer(N, D, *, m_1, s_1, alpha, m_2, s_2, beta, m_3, s_3, gamma):
    """The paper's a N^q + b is m + s ((N / 1e9)^q - 1) / q here, with m its value and s its slope in log N at N = 1e9:
    a = s / (q 1e9^q), b = m - s / q. Those a and b are hardly to be told from each other; m and s are."""
    def bent(m, s, q):
        return m + s * (power(N / 1e9, q) - 1) / q

    return exp(bent(m_3, s_3, gamma)) + exp(bent(m_2, s_2, beta) - exp(bent(m_1, s_1, alpha)) * log(D))


def _farseer(u, y, N, D):
    E, (excess,) = floor_and_shares(u, y, 1)
    away, exponent = np.log(middle(N) / 1e9), span(u[8], 0.1, 1.0)
    s_1, s_2, s_3 = 0.2 * (2 * u[5] - 1), 2 * u[6] - 0.5, -0.3 * u[7]
    return (np.log(exponent) - s_1 * away, s_1, span(u[2], 0.03, 0.5),
            np.log(excess) + exponent * np.log(middle(D)) - s_2 * away, s_2, span(u[3], 0.03, 0.5),
            np.log(E + 1e-3 * y.min()) - s_3 * away, s_3, span(u[4], 0.03, 0.5))


def bnsl(x, *, a, b, c_0, c_1, d_1, f_1):
    """A power law whose exponent goes from c_0 to c_0 + c_1 around x = d_1, the more sharply the smaller f_1."""
    return a + b * exp(-c_0 * log(x) - c_1 * f_1 * logaddexp(0.0, log(x / d_1) / f_1))


def _bnsl(u, y, x):
    a, (excess,) = floor_and_shares(u, y, 1)
    c_0, c_1, d_1, f_1 = 2 * u[2] - 0.5, 2 * u[3] - 1, span(u[4], x.min(), x.max()), span(u[5], 0.1, 1.5)
    bend = np.exp(c_0 * np.log(middle(x)) + c_1 * f_1 * np.logaddexp(0.0, np.log(middle(x) / d_1) / f_1))
    return a, excess * bend, c_0, c_1, d_1, f_1


def three_axis(N, D, C_inf, *, A, B, K, E, alpha, beta, kappa):
    return chinchilla(N, D, A=A, B=B, E=E, alpha=alpha, beta=beta) + K * power(C_inf, -kappa)


def _three_axis(u, y, N, D, C_inf):
    E, shares = floor_and_shares(u, y, 3)
    exponents = [span(u[i], 0.05, 1.0) for i in (4, 5, 6)]
    scales = [s * middle(x) ** q for s, x, q in zip(shares, (N, D, C_inf), exponents, strict=True)]
    return *scales, E, *exponents


ROWS = (
    Law("kaplan_n", KAPLAN + "1.1", "L(N) = (N_c / N)^alpha_N", kaplan_n, _through_the_middle, (8.8e13, 0.076)),
    Law("kaplan_d", KAPLAN + "1.2", "L(D) = (D_c / D)^alpha_D", kaplan_d, _through_the_middle, (5.4e13, 0.095)),
    Law("kaplan_c", KAPLAN + "1.3", "L(C) = (C_c / C)^alpha_C; the paper's C_c is 3.1e8 petaflop-days", kaplan_c,
        _through_the_middle, (3.1e8 * 8.64e19, 0.050)),
    Law("kaplan_nd", KAPLAN + "1.5", "L(N, D) = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D", kaplan_nd,
        _kaplan_nd, (6.4e13, 1.8e13, 0.076, 0.103)),
    Law("kaplan_ns", KAPLAN + "1.6", "L(N, S) = (N_c / N)^alpha_N + (S_c / S)^alpha_S", kaplan_ns, _kaplan_ns,
        (6.5e13, 2.1e3, 0.077, 0.76)),
    Law("chinchilla", "Hoffmann et al. 2022, arXiv 2203.15556, section 3.3",
        "L(N, D) = E + A / N^alpha + B / D^beta", chinchilla, _chinchilla, (406.4, 410.7, 1.69, 0.34, 0.28)),
    Law("chinchilla_tied", MUENNIGHOFF, "L(N, D) = E + A / N^alpha + B / D^alpha", chinchilla_tied, _chinchilla_tied,
        (521.0, 1488.0, 1.87, 0.3526596)),
    Law("envelope", "Henighan et al. 2020, arXiv 2010.14701, eq. 1.1", "L(C) = E + A / C^alpha", envelope, _envelope,
        (1.7, 88.3, 0.09)),
    Law("overtraining", "Gadre et al. 2024, arXiv 2403.08540, eq. 4",
        "L(N, D) = E + (a M^eta + b M^-eta) / C^eta, C = 6 N D, M = D / N", overtraining, _overtraining,
        (1.51, 141.0, 190.0, 0.121)),
    Law("data_constrained", MUENNIGHOFF,
        "L(N, D, U) = E + A / N'^alpha + B / D'^beta, D' = U (1 + R_D (1 - exp(-(D / U - 1) / R_D))), N' alike with "
        "R_N from the N that suits U", data_constrained, _data_constrained,
        (521.0, 1488.0, 1.87, 0.3526596, 0.3526596, 15.387756, 5.309743)),
    Law("data_penalty", "additive penalty with one coefficient after Lovelace et al. 2026, arXiv 2605.01640; its "
        "factor here is ours", "L(N, D, U) = E + A / N^alpha + B / D^beta + P (D / U - 1) N / U", data_penalty,
        _data_penalty, (406.4, 410.7, 1.69, 0.34, 0.28, 0.02)),
    Law("data_saturating", "Practical Scaling Laws 2026, arXiv 2605.09189, abstract",
        "L(N, D, U) = E + (L_0 - E) h / (1 + h), h = a / N^alpha + b / D^beta + c N^gamma / U^delta", data_saturating,
        _data_saturating, (1.7, 10.0, 60.0, 80.0, 0.5, 0.33, 0.3, 0.4, 0.5)),
    Law("farseer", "Li et al. 2025, arXiv 2506.10972, eq. 1",
        "L(N, D) = exp(f_3) + exp(f_2) / D^exp(f_1), f_i = m_i + s_i ((N / 1e9)^q - 1) / q with q = alpha, beta, gamma",
        farseer, _farseer, (-1.12, -0.0144, 0.12, 7.24, 0.336, 0.15, 0.222, -0.115, 0.17),
        real=("m_1", "s_1", "m_2", "s_2", "m_3", "s_3")),
    Law("bnsl", "Caballero et al. 2022, arXiv 2210.14891, eq. 1, one break",
        "y(x) = a + b x^-c_0 (1 + (x / d_1)^(1 / f_1))^(-c_1 f_1)", bnsl, _bnsl, (0.3, 30.0, 0.15, 0.4, 1e6, 0.5),
        real=("c_0", "c_1")),
    Law("three_axis", "Hoffmann et al. 2022 with a third term, a power of test-time FLOPs (ours)",
        "L(N, D, C_inf) = E + A / N^alpha + B / D^beta + K / C_inf^kappa", three_axis, _three_axis,
        (406.4, 410.7, 30.0, 1.2, 0.34, 0.28, 0.15)),
)
