"""Laws of the loss of mixtures of experts: parameters N (active, or of the dense model), tokens D, experts E,
granularity G."""

from typing import Any

from jaxpt.scaling.either import log, log10, power
from jaxpt.scaling.laws import Law, floor_and_shares, middle, span


def saturated(E: Any, E_start: Any, E_max: Any) -> Any:
    """The E^ of Clark et al. 2022, section 4: E_start at E = 1, E_max without end, E in between."""
    return 1 / (1 / (E - 1 + 1 / (1 / E_start - 1 / E_max)) + 1 / E_max)


def clark(N, E, *, a, b, c, d, E_start, E_max):
    n, e = log10(N), log10(saturated(E, E_start, E_max))
    return power(10.0, a * n + b * e + c * n * e + d)


def _clark(u, y, N, E):
    a, b, c = -span(u[0], 0.02, 0.5), -span(u[1], 0.02, 0.5), 0.1 * (u[2] - 0.5)
    n, e = log10(middle(N)), log10(middle(E))
    return (a, b, c, log10(middle(y)) - a * n - b * e - c * n * e, span(u[3], 1.05, 10.0),
            span(u[4], max(E.max() / 4, 20.0), 8 * E.max()))


def krajewski(N, D, G, *, a, b, c, g, alpha, beta, gamma):
    return c + (g * power(G, -gamma) + a) * power(N, -alpha) + b * power(D, -beta)


def _krajewski(u, y, N, D, G):
    c, (fine, from_N, from_D) = floor_and_shares(u, y, 3)
    alpha, beta, gamma = span(u[4], 0.05, 1.0), span(u[5], 0.05, 1.0), span(u[6], 0.1, 2.0)
    scale = middle(N) ** alpha
    return from_N * scale, from_D * middle(D) ** beta, c, fine * scale * middle(G) ** gamma, alpha, beta, gamma


def joint_experts(N, D, E, *, a, b, c, alpha, beta, gamma, delta, zeta, omega):
    """Signs: read as exponents of denominators the printed constants are 0.2285, 0.1889 - 0.0098 log E and
    -0.5529, 0.1775 + 0.0259 log E; only so does the loss fall with N, D and, beyond 2e9 tokens, with E."""
    e = log(E)
    return c + a * power(E, delta) * power(N, alpha + gamma * e) + b * power(E, omega) * power(D, beta + zeta * e)


def _joint_experts(u, y, N, D, E):
    c, (from_N, from_D) = floor_and_shares(u, y, 2)
    alpha, beta = -span(u[3], 0.05, 1.0), -span(u[4], 0.05, 1.0)
    gamma, zeta = 0.05 * (2 * u[5] - 1), 0.05 * (2 * u[6] - 1)
    delta = 0.3 * (2 * u[7] - 1) - gamma * log(middle(N))
    omega = 0.3 * (2 * u[8] - 1) - zeta * log(middle(D))
    return (from_N * middle(N) ** -alpha, from_D * middle(D) ** -beta, c, alpha, beta, gamma, delta, zeta, omega)


ROWS = (
    Law("clark", "Clark et al. 2022, arXiv 2202.01169, section 4",
        "log10 L(N, E) = a log10 N + b log10 E^ + c log10 N log10 E^ + d, "
        "1 / E^ = 1 / (E - 1 + 1 / (1 / E_start - 1 / E_max)) + 1 / E_max", clark, _clark,
        (-0.082, -0.108, 0.009, 1.104, 1.847, 314.478), real=("a", "b", "c", "d")),
    Law("krajewski", "Krajewski et al. 2024, arXiv 2402.07871, section 5",
        "L(N, D, G) = c + (g / G^gamma + a) / N^alpha + b / D^beta", krajewski, _krajewski,
        (18.1, 30.8, 0.47, 2.1, 0.115, 0.147, 0.58)),
    Law("joint_experts", "Ludziejewski et al. 2025, arXiv 2502.05172",
        "L(N, D, E) = c + a E^delta N^(alpha + gamma log E) + b E^omega D^(beta + zeta log E)", joint_experts,
        _joint_experts, (35.91, 35.98, 1.3637, -0.1889, -0.1775, 0.0098, -0.2285, -0.0259, 0.5529),
        real=("alpha", "beta", "gamma", "delta", "zeta", "omega")),
)
