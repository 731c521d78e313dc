"""jaxpt: a laboratory for LLM training. Importing it does not import jax."""

__version__ = "0.1.0"
