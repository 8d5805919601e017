"""Installed packages of SGLang's stack, from their metadata alone: works where none of them can be imported."""

import re
from importlib.metadata import PackageNotFoundError, requires, version
from typing import NamedTuple

STACK = ("sglang", "torch", "triton", "flashinfer-python", "sglang-kernel", "transformers", "numpy")
_DISTRIBUTIONS = {"flashinfer": "flashinfer-python", "sgl_kernel": "sglang-kernel"}
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(\[[^]]*\])?\s*(?P<bounds>[^;]*)(?P<condition>.*)")


class Problem(NamedTuple):
    """Something that keeps `--attention-backend locks` from running, and what to do about it."""

    what: str
    fix: str


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, None without one."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def normalized(name: str) -> str:
    """Distribution name in the form in which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted(distribution: str) -> str:
    """What SGLang (or torch, for what torch brings) requires of a distribution, e.g. "torch==2.11.0"; else its bare name."""
    for owner in ("sglang", "torch"):
        for line in (requires(owner) or []) if installed(owner) else []:
            parts = _REQUIREMENT.match(line)
            if parts and normalized(parts["name"]) == distribution and "extra ==" not in parts["condition"]:
                return distribution + parts["bounds"].strip(" ()")
    return distribution


def missing_package(error: ImportError) -> Problem:
    """What to tell a user whose start failed with `error`: the package that does not import, and how to get it back."""
    module = (error.name or "").split(".")[0]
    if not module:
        return Problem(f"SGLang's stack does not import: {error}", "reinstall SGLang")
    distribution = _DISTRIBUTIONS.get(module, normalized(module))
    found, need = installed(distribution) or "none", wanted(distribution)
    return Problem(
        f"{distribution} cannot be imported ({error}); installed: {found}, wanted: {need}",
        f"pip install --force-reinstall --no-deps '{need}'",
    )
