"""How other processes compile: what to tell XLA, and where compiled programs are kept. Imports nothing heavy."""

import importlib.metadata
import os
from pathlib import Path

QUICK_TO_COMPILE = ["--xla_backend_optimization_level=0"]
if importlib.metadata.version("jaxlib") < "0.11":  # the older emitters are quicker still; later versions do without
    QUICK_TO_COMPILE += ["--xla_cpu_use_fusion_emitters=false"]


def cache_folder() -> Path | None:
    """Where compiled programs are kept: JAXPT_CACHE (a folder, or off), else in the user's cache."""
    chosen = os.environ.get("JAXPT_CACHE", "")
    if chosen.lower() == "off":
        return None
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpt" / "xla"


def keep_programs() -> None:
    """From now on this process keeps what it compiles, and takes what others have; JAX_COMPILATION_CACHE_DIR names another
    place."""
    import jax

    folder = jax.config.jax_compilation_cache_dir or cache_folder()
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
