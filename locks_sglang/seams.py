"""Where SGLang is entered: one `Seam` a hook, one file a topic under `patches/`.

Every seam is a hook of SGLang's own plugin framework, registered in every process and inert unless `locks` is the
attention backend. Nothing of SGLang is edited.
"""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BACKEND = "locks"

PATCH_MODULES = (
    "backend_choice",
    "command_line",
    "argument_resolution",
    "memory_sizing",
    "graph_capture",
    "kv_arrival",
    "mixed_batch",
    "internal_state",
    "idle",
    "metrics",
    "cpu_rotary",
    "cpu_dispatch",
    "cpu_allocator",
)


@dataclass(frozen=True)
class Seam:
    """One hook on one SGLang function.

    Args:
        target: dotted path of the function or method.
        kind: "before", "after" or "around", as in `sglang.srt.plugins.hook_registry.HookType`; or "call": no hook, `hook()`
            calls the target, an extension point of SGLang.
        hook: the hook function; must leave the behaviour of every other backend as it is.
        why: what it changes, in one sentence, for `doctor` and the docs.
        versions: SGLang versions whose target exists, as (first, first excluded); None is open.
        device: "any", or the device type on which the hook acts.
        probe: for "call": whether the call took effect.
    """

    target: str
    kind: str
    hook: Callable[..., Any]
    why: str
    versions: tuple[str | None, str | None] = (None, None)
    device: str = "any"
    probe: Callable[[], bool] | None = None

    def applies_to(self, version: str) -> bool:
        """Whether this SGLang version has the target."""
        first, end = self.versions
        key = version_key(version)
        return (first is None or key >= version_key(first)) and (end is None or key < version_key(end))


def version_key(version: str) -> tuple[int, ...]:
    """Comparable numbers of a release version; what follows the third number (rc, post, local) is ignored."""
    numbers: list[int] = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = re.match(r"\d*", part)
        numbers.append(int(digits[0] or 0) if digits else 0)
    return tuple(numbers)


def all_seams() -> list[Seam]:
    """Every seam of every patch file, in order. Imports the patch files, not SGLang."""
    found: list[Seam] = []
    for name in PATCH_MODULES:
        found.extend(importlib.import_module(f"locks_sglang.patches.{name}").SEAMS)
    return found


def register_seams(version: str) -> None:
    """Register every seam of this SGLang version with its plugin framework. Safe to call again."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for seam in all_seams():
        if not seam.applies_to(version):
            continue
        if seam.kind == "call":
            seam.hook()
            continue
        registered = HookRegistry._hooks.get(seam.target, [])
        if not any(hook is seam.hook for _, hook, _ in registered):
            HookRegistry.register(seam.target, seam.hook, HookType(seam.kind))


def seam_status(version: str) -> list[tuple[Seam, str]]:
    """State of every seam in this process: "active", "not needed" in this version, or "missing" (not hooked)."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    def state(seam: Seam) -> str:
        if not seam.applies_to(version):
            return "not needed"
        if seam.probe is not None:
            return "active" if seam.probe() else "missing"
        registered = HookRegistry._hooks.get(seam.target, [])
        hooked = any(hook is seam.hook for _, hook, _ in registered) and seam.target in HookRegistry._patched
        return "active" if hooked else "missing"

    return [(seam, state(seam)) for seam in all_seams()]


def selected(server_args: Any) -> bool:
    """Whether these (resolved) server arguments choose `locks` for prefill or decode."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    return BACKEND in attention_backends_of(resolved_view(server_args))


def named(view: Any) -> bool:
    """Whether arguments under resolution name `locks` anywhere."""
    names = (view.attention_backend, view.prefill_attention_backend, view.decode_attention_backend)
    return BACKEND in names


def serving() -> bool:
    """Whether this process serves `locks`; False where SGLang has not published its arguments."""
    from sglang.srt.arg_groups.overrides import attention_backends_of
    from sglang.srt.runtime_context import get_exec

    try:
        return BACKEND in attention_backends_of(get_exec().kernel)
    except ValueError:
        return False
