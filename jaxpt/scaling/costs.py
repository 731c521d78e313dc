"""From FLOPs to hours and money, and what either buys."""

from typing import NamedTuple

import numpy as np

from jaxpt.scaling.frontier import compute_for, optimum


class Machine(NamedTuple):
    peak: float  # FLOP/s of one accelerator
    utilisation: float  # share of the peak that the model's own FLOPs reach (MFU)
    price: float  # money per accelerator and hour


class Bill(NamedTuple):
    hours: np.ndarray  # of one accelerator
    money: np.ndarray


def bill(C: np.ndarray, machine: Machine) -> Bill:
    hours = np.asarray(C, np.float64) / (machine.peak * machine.utilisation * 3600)
    return Bill(hours, hours * machine.price)


def affordable(money: float, machine: Machine) -> float:
    """FLOPs that `money` buys."""
    return money / machine.price * 3600 * machine.peak * machine.utilisation


def factor_for_drop(params: np.ndarray, C: float, share: float, flop: float = 6.0) -> float:
    """By how much compute must grow from the best use of C for a loss lower by `share`; inf where that is at or
    below E. A pure power law of exponent g (E = 0) would say (1 - share)^(-1/g); with E the same drop costs
    orders of magnitude more."""
    return float(compute_for(params, (1 - share) * optimum(params, C, flop).loss, flop) / C)


class Utilisation(NamedTuple):
    loss_drop: float  # nats at equal money
    share: float  # the same, as a share of the loss
    money: float  # saved at equal loss


def value_of_utilisation(params: np.ndarray, money: float, machine: Machine, better: float,
                         flop: float = 6.0) -> Utilisation:
    """What raising the utilisation to `better` is worth to a run that costs `money`."""
    before = optimum(params, affordable(money, machine), flop).loss
    after = optimum(params, affordable(money, machine._replace(utilisation=better)), flop).loss
    saved = money * (1 - machine.utilisation / better)
    return Utilisation(float(before - after), float((before - after) / before), saved)
