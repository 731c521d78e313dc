"""Scaling laws: fits, intervals, frontiers. Pure functions of NumPy arrays; the closed form
never imports jax."""
