"""A layer of experts whose router is trained by reinforcement, small enough that the expected loss is a sum over routes.

N inputs in clusters, each cluster with a linear teacher of its own; the student has E linear experts and a linear router
that draws k of them, whose mean outputs are the logits. Every estimator trains a student from the same start on the same
batches; expected loss and gradient are exact, over all routes.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpt.ops.masked import stop
from jaxpt.ops.routes import all_routes, draw_route, leave_one_out, reinforced, route_logp, straight_through
from jaxpt.ops.routing import choose, scores_of, weigh
from jaxpt.train.common import check_positive, when_due
from jaxpt.train.program import Program
from jaxpt.types import Array

ESTIMATORS = ("exact", "reinforce", "no_baseline", "shuffled", "straight_through", "top_k", "frozen")


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    experts: int = 8
    top_k: int = 2
    samples: int = 4  # routes of an input, of the estimators that draw
    clusters: int = 6
    features: int = 8
    classes: int = 8
    spread: float = 0.5  # deviation of inputs around their cluster's centre, whose entries have deviation 1
    inputs: int = 96  # of the fixed set on which the exact loss is taken
    batch: int = 32
    learning_rate: float = 0.3  # of gradient descent, experts' and routers'; the default of every estimator's own
    temperature: float = 1.0  # of straight_through
    draws: int = 256  # estimates of one gradient, of which noise and bias are measured
    every: int = 20

    def __post_init__(self):
        check_positive(self, "samples", "clusters", "features", "classes", "inputs", "batch", "every", "temperature")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k: got {self.top_k!r}, expected a number from 1 to experts = {self.experts}")
        if self.samples < 2:
            raise ValueError(f"samples: got {self.samples!r}, expected at least 2 for a leave-one-out baseline")


def make_routing(cfg: RoutingConfig) -> Program:
    """The leaf rate_NAME is an estimator's learning rate. Metrics, for each of ESTIMATORS:
      loss_NAME   the exact one as deployed (routes drawn; top_k: its own); fit_NAME is its negative, for sweeps
    and when due, of the router's gradient at the student that `reinforce` has trained:
      noise_NAME  variance over the squared length of the exact gradient
      length_NAME of the mean of `draws` estimates, over that of the exact gradient
      cosine_NAME of the mean of `draws` estimates with the exact gradient
    `shuffled` is reinforce with every input's advantages given to the next one.
    """
    routes = jnp.asarray(all_routes(cfg.experts, cfg.top_k))

    def init(key, hyper, start=None):
        keys = jax.random.split(jax.random.fold_in(key, 0), 6)
        E, D, K = cfg.experts, cfg.features, cfg.classes
        centres = jax.random.normal(keys[0], (cfg.clusters, D))
        cluster = jax.random.randint(keys[1], (cfg.inputs,), 0, cfg.clusters)
        x = centres[cluster] + cfg.spread * jax.random.normal(keys[2], (cfg.inputs, D))
        teacher = jax.random.normal(keys[3], (cfg.clusters, D, K))
        label = jnp.argmax(jnp.einsum("nd,ndk->nk", x, teacher[cluster]), axis=1)
        student = {
            "router": 0.1 * jax.random.normal(keys[4], (D, E)), "experts": 0.3 * jax.random.normal(keys[5], (E, D, K)),
        }
        student = jax.tree.map(lambda w: jnp.repeat(w[None], len(ESTIMATORS), axis=0), student)
        return {"params": student, "x": x, "label": label, "key": key, "step": jnp.int32(0), "hyper": hyper}

    def step(state):
        key = jax.random.fold_in(state["key"], 1 + state["step"])
        pick, noise = jax.random.split(key)
        batch = jax.random.randint(pick, (cfg.batch,), 0, cfg.inputs)
        x, label, rates = state["x"][batch], state["label"][batch], state["hyper"]
        new, done = [], state["step"] + 1
        for number, name in enumerate(ESTIMATORS):
            params = jax.tree.map(lambda w: w[number], state["params"])  # noqa: B023
            grads = jax.grad(objective(cfg, name, routes))(params, x, label, noise)
            new.append(jax.tree.map(lambda w, g: w - rates[f"rate_{name}"] * g, params, grads))  # noqa: B023
        params = jax.tree.map(lambda *w: jnp.stack(w), *new)
        loss = {
            f"loss_{name}": objective(cfg, "top_k" if name == "top_k" else "exact", routes)(
                new[number], state["x"], state["label"], None
            )
            for number, name in enumerate(ESTIMATORS)
        }
        fit = {f"fit_{name}": -loss[f"loss_{name}"] for name in ESTIMATORS}
        measured = when_due(done, cfg.every, lambda: _quality(cfg, routes, new[1], x, label, noise))
        return {**state, "params": params, "step": done}, {**loss, **fit, **measured}

    rates = {f"rate_{name}": cfg.learning_rate for name in ESTIMATORS}
    return Program(init, step, rates, lambda state: state["params"])


def objective(cfg: RoutingConfig, name: str, routes: Array):
    """The function of (params, x [N,D], label [N], key) whose gradient is the estimator's."""

    def cross_entropy(outputs: Array, weights: Array, label: Array) -> Array:
        """outputs [N,E,K], weights [N,...,E], label [N] -> [N,...]."""
        logp = jax.nn.log_softmax(jnp.einsum("n...e,nek->n...k", weights, outputs), axis=-1)
        at = label.reshape(-1, *(1,) * (weights.ndim - 1))
        return -jnp.take_along_axis(logp, jnp.broadcast_to(at, (*logp.shape[:-1], 1)), axis=-1)[..., 0]

    def hard(route: Array) -> Array:
        return jax.nn.one_hot(route, cfg.experts).sum(axis=-2) / cfg.top_k

    def run(params, x, label, key):
        outputs = jnp.einsum("nd,edk->nek", x, params["experts"])
        logits = x @ params["router"]
        if name == "frozen":
            logits = jax.lax.stop_gradient(logits)
        if name == "top_k":
            scores = scores_of("softmax", logits)
            index = choose(scores, cfg.top_k)
            gates = weigh(scores, index, normalise=True)
            weights = jnp.sum(jax.nn.one_hot(index, cfg.experts) * gates[..., None], axis=1)
            return jnp.mean(cross_entropy(outputs, weights, label))
        if name == "exact":
            every = jnp.broadcast_to(routes[None], (len(x), *routes.shape))
            p = jnp.exp(route_logp(logits[:, None, :], every))
            return jnp.mean(jnp.sum(p * cross_entropy(outputs, hard(every), label), axis=1))
        noise = jax.random.gumbel(key, (len(x), cfg.samples, cfg.experts))
        many = jnp.broadcast_to(logits[:, None, :], noise.shape)
        if name == "straight_through":
            weights = straight_through(many, noise, cfg.top_k, cfg.temperature) / cfg.top_k
            return jnp.mean(cross_entropy(outputs, weights, label))
        route = draw_route(many, noise, cfg.top_k)
        loss = cross_entropy(outputs, hard(route), label)
        logp = route_logp(many, route)
        if name == "shuffled":
            return jnp.mean(jnp.roll(stop(leave_one_out(loss)), 1, axis=0) * logp + loss)
        return jnp.mean(reinforced(loss, logp, baseline=name != "no_baseline"))

    return run


def _quality(cfg: RoutingConfig, routes: Array, params: dict, x: Array, label: Array, key: Array) -> dict[str, Array]:
    def of_router(name, key):
        return jax.grad(objective(cfg, name, routes))(params, x, label, key)["router"].reshape(-1)

    exact = of_router("exact", None)
    out = {}
    for name in ESTIMATORS:
        some = jax.vmap(lambda k: of_router(name, k))(jax.random.split(key, cfg.draws))  # noqa: B023
        mean = some.mean(axis=0)
        length, known = jnp.linalg.norm(mean), jnp.linalg.norm(exact)
        out[f"noise_{name}"] = jnp.sum(jnp.var(some, axis=0)) / known**2
        out[f"length_{name}"] = length / known
        out[f"cosine_{name}"] = mean @ exact / (length * known + 1e-30)
    return out
