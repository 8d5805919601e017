"""Where SGLang is entered: active in real processes, inert for other backends, present in every release of the range."""

import ast
import concurrent.futures
import inspect
import json
import multiprocessing
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.server_args import ServerArgs
from starts import SGLANG, model_folder, run_all

from locks_sglang.backend import LocksAttnBackend
from locks_sglang.patches import metrics
from locks_sglang.seams import Seam, all_seams, version_key
from locks_sglang.support import NOT_IN_EVERY_VERSION, check_arguments

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / "build" / "sglang_wheels"
VERSIONS = [f"0.5.{release}" for release in range(17, 24)]
SEAMS = all_seams()

# --- in real processes ------------------------------------------------------------------------------------------------


def report() -> dict[str, Any]:
    """In a fresh process: load SGLang's plugins, then call our entry function and SGLang's loader once more."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry

    from locks_sglang.plugin import register
    from locks_sglang.seams import seam_status

    def look() -> dict[str, Any]:
        return {
            "states": [state for _, state in seam_status(SGLANG)],
            "choices": server_args.ATTENTION_BACKEND_CHOICES.count("locks"),
            "registered": "locks" in ATTENTION_BACKENDS,
            "hooks": [sum(hook is seam.hook for _, hook, _ in HookRegistry._hooks.get(seam.target, [])) for seam in SEAMS],
        }

    first = look()
    register()
    load_plugins()
    return {"first": first, "second": look()}


def report_with_child() -> list[dict[str, Any]]:
    """`report` of this process and of one that it spawns."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        child = pool.submit(report)
        return [report(), child.result()]


@pytest.fixture(scope="module")
def family() -> list[dict[str, Any]]:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(report_with_child).result()


@pytest.mark.parametrize("process", [0, 1], ids=["parent", "spawned"])
@pytest.mark.parametrize("time", ["first", "second"])
def test_every_seam_is_active_once(family: list[dict[str, Any]], process: int, time: str) -> None:
    found = family[process][time]
    assert found["choices"] == 1
    assert found["registered"]
    assert found["states"] == ["active" if seam.applies_to(SGLANG) else "not needed" for seam in SEAMS]
    assert found["hooks"] == [int(seam.applies_to(SGLANG) and seam.kind != "call") for seam in SEAMS]


def without_triton(folder: str) -> dict[str, str]:
    """In a fresh process: triton and flashinfer vanish, then our entry function runs and SGLang builds the backend."""
    from models import runner
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins import load_plugins
    from starts import resolve

    load_plugins()
    made = runner(Path(folder))
    made.device = "cuda"  # where triton may be asked for; the missing import shows before a device is used
    made.server_args = resolve(["--model-path", folder, "--device", "cpu", "--attention-backend", "locks"])
    server_args.ATTENTION_BACKEND_CHOICES.remove("locks")
    del ATTENTION_BACKENDS["locks"]
    gone = ("triton", "flashinfer", "locks_sglang", "sglang.srt.layers.attention.triton_backend")
    for module in [module for module in sys.modules if f"{module}.".startswith(tuple(f"{name}." for name in gone))]:
        del sys.modules[module]
    sys.modules["triton"] = sys.modules["flashinfer"] = None  # type: ignore[assignment]

    from locks_sglang.plugin import register

    register()
    os.environ["LOCKS_DENSE_BACKEND"] = "triton"
    try:
        ATTENTION_BACKENDS["locks"](made)
        message = ""
    except ValueError as error:
        message = f"{type(error).__name__}: {error}"
    return {"choices": str(server_args.ATTENTION_BACKEND_CHOICES.count("locks")), "message": message}


def test_a_package_that_does_not_import_shows_as_itself(tmp_path: Path) -> None:
    """Not as an unknown backend: the name is registered all the same, and building it names the package and the fix."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(without_triton, str(tmp_path / "model")).result()
    assert found["choices"] == "1"
    start = "UnsupportedError: locks cannot start: triton cannot be imported (import of triton halted; None in sys.modules); "
    assert found["message"].startswith(start)
    need = re.escape(f"installed: {metadata.version('triton')}, wanted: triton")
    assert re.search(rf"{need}\S+\. pip install --force-reinstall --no-deps 'triton[=~]=[\d.]+'$", found["message"])


# --- the backend's contract -------------------------------------------------------------------------------------------

PUBLIC = [name for name, member in vars(LocksAttnBackend).items() if callable(member) and not name.startswith("_")]


@pytest.mark.parametrize("name", PUBLIC)
def test_methods_exist_on_the_base(name: str) -> None:
    """No orphan overrides: SGLang still declares the method, and ours takes what SGLang's takes."""
    declared = inspect.signature(getattr(AttentionBackend, name)).parameters
    ours = inspect.signature(getattr(LocksAttnBackend, name)).parameters
    kinds = {parameter.kind for parameter in ours.values()}
    for position, (parameter, spec) in enumerate(declared.items()):
        if spec.kind in (spec.VAR_POSITIONAL, spec.VAR_KEYWORD):
            assert spec.kind in kinds
        elif parameter in ours:
            assert list(ours)[position] == parameter or ours[parameter].kind is spec.KEYWORD_ONLY
            assert (ours[parameter].default is spec.empty) <= (spec.default is spec.empty)
        else:
            assert spec.kind is spec.KEYWORD_ONLY
            assert spec.VAR_KEYWORD in kinds
    own = [spec for parameter, spec in ours.items() if parameter not in declared]
    assert all(spec.default is not spec.empty or spec.kind in (spec.VAR_POSITIONAL, spec.VAR_KEYWORD) for spec in own)


def test_forwards_accept_new_keywords() -> None:
    for name in ("forward_extend", "forward_decode"):
        kinds = [spec.kind for spec in inspect.signature(getattr(LocksAttnBackend, name)).parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD in kinds


# --- other backends ---------------------------------------------------------------------------------------------------

DUMP = """
import json, logging, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
from sglang.srt.arg_groups.overrides import resolved_view
outcomes = []
for flags in json.loads(sys.argv[2]):
    server_args = prepare_server_args(["--model-path", sys.argv[1], "--device", "cpu", "--random-seed", "1", *flags])
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    view = resolved_view(server_args)
    names = getattr(type(server_args), "__struct_fields__", None) or type(server_args).__dataclass_fields__
    outcomes.append({name: repr(getattr(view, name)) for name in names})
print("RESULT", json.dumps(outcomes))
"""


def test_installing_changes_nothing_for_other_backends(tmp_path: Path) -> None:
    """Every resolved argument of SGLang is the same with the plugin and without it, whatever `LOCKS_*` variables say."""
    others = [entry.name for entry in metadata.entry_points(group="sglang.srt.plugins") if entry.name != "locks"]
    runs = [[], ["--attention-backend", "torch_native"], ["--attention-backend", "triton", "--page-size", "1"]]
    command = [sys.executable, "-c", DUMP, model_folder(tmp_path / "model"), json.dumps(runs)]
    choices = [["locks", *others], others or ["none"]]
    children = run_all([(command, {"SGLANG_PLUGINS": ",".join(chosen), "LOCKS_RANK": "99"}) for chosen in choices])
    assert all("RESULT" in child.stdout for child in children), children
    with_locks, without = (json.loads(child.stdout.split("RESULT", 1)[1]) for child in children)
    assert with_locks == without
    assert len(with_locks) == len(runs)


def hook(target_end: str) -> Callable[..., Any]:
    (seam,) = [seam for seam in SEAMS if seam.target.endswith(target_end)]
    return seam.hook


def torch_native() -> Any:
    return ServerArgs(model_path="dummy", attention_backend="torch_native")


AROUND: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    (
        "_page_size_default",
        (SimpleNamespace(attention_backend="triton", prefill_attention_backend=None, decode_attention_backend=None),),
        {},
    ),
    (
        "_deterministic_attention_backend",
        (
            SimpleNamespace(
                attention_backend="triton",
                prefill_attention_backend=None,
                decode_attention_backend=None,
                enable_deterministic_inference=True,
            ),
        ),
        {},
    ),
    (
        "capture_prefill_graph",
        (),
        {
            "model_runner": SimpleNamespace(server_args=torch_native(), device="cpu"),
            "eager_runner": object(),
            "force_for_draft_worker": True,
        },
    ),
    ("capture_one_shape", (SimpleNamespace(attn_backend=SimpleNamespace()), 8, len, 0, "lora", "dense"), {}),
    (
        "set_internal_state",
        (
            SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=object)),
            SimpleNamespace(server_args={"locks_audit": 0}),
        ),
        {},
    ),
    (
        "report_decode_stats",
        (
            SimpleNamespace(
                scheduler=SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=object)),
                forward_ct_decode=40,
                decode_log_interval=40,
                current_scheduler_metrics_enabled=True,
            ),
            True,
        ),
        {"running_batch": object()},
    ),
    *(
        (
            f"{kind}.start_loading",
            (SimpleNamespace(mem_pool_device=object(), load_queue=[SimpleNamespace(device_indices=0)]),),
            {},
        )
        for kind in ("HiCacheController", "HybridCacheController")
    ),
    ("RotaryEmbedding.__init__", (object(), 64, 64, 4096, 10000), {"is_neox_style": True}),
    ("get_last_loc", (torch.zeros(2, 4), torch.zeros(1), torch.ones(1)), {}),
    ("alloc_extend", (SimpleNamespace(device="cpu"), *(torch.ones(1) for _ in range(5)), 1), {}),
    ("alloc_decode", (SimpleNamespace(device="cpu"), *(torch.ones(1) for _ in range(3))), {}),
]


@pytest.mark.parametrize(("end", "args", "kwargs"), AROUND, ids=[end for end, _, _ in AROUND])
def test_around_hooks_pass_other_backends_through(end: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    calls = []

    def original(*given: Any, **named: Any) -> str:
        calls.append((given, named))
        return "result of SGLang"

    result = hook(end)(original, *args, **kwargs)
    ((given, named),) = calls
    assert len(given) == len(args)
    assert all(one is two for one, two in zip(given, args, strict=True))
    assert named == kwargs
    assert result == "result of SGLang" or end.endswith("__init__")


def test_after_hooks_leave_other_backends_alone() -> None:
    kvc = SimpleNamespace(is_draft_worker=False, server_args=torch_native())
    assert hook("_compute_cell_size")(1000, object(), kvc, 2) is None
    assert all(hook("support_triton")(True, name) is None for name in ("triton", "torch_native", "flashinfer", "fa3"))
    pool = SimpleNamespace()
    slots = torch.arange(4)
    controller = SimpleNamespace(mem_pool_device=pool)
    assert hook("HiCacheController.load")(slots, controller, slots) is None
    assert hook("HybridCacheController.load")(slots, controller, slots) is None
    assert hook("MHATokenToKVPool.load_cpu_copy")(None, pool, [], slots) is None
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    batch = SimpleNamespace(token_to_kv_pool_allocator=allocator)
    assert hook("mix_with_running")(None, batch, SimpleNamespace(reqs=[])) is None
    assert hook("_resolve_lora_variant")("lora", SimpleNamespace(attn_backend=SimpleNamespace()), object()) is None
    reporter = SimpleNamespace(scheduler=batch, current_scheduler_metrics_enabled=True)
    assert hook("report_prefill_stats")(None, reporter, batch, object(), True) is None
    assert hook("_maybe_log_idle_metrics")(None, reporter) is None
    assert set(vars(reporter)) == {"scheduler", "current_scheduler_metrics_enabled"}
    state = SimpleNamespace(internal_state={})
    assert hook("get_internal_state")(state, batch) is None
    assert state.internal_state == {}
    assert hook("maybe_sleep_on_idle")(batch) is None
    assert set(vars(batch)) == {"token_to_kv_pool_allocator"}
    assert vars(pool) == {}


def test_every_hook_is_tried_on_another_backend() -> None:
    """Above; flags, which the command line of every backend has, and the choice in `test_installing_changes_nothing...`."""
    around = {seam.target for seam in SEAMS if seam.kind == "around"}
    after = {seam.target for seam in SEAMS if seam.kind in ("before", "after") and not seam.target.endswith(".add_cli_args")}
    assert sum(target.endswith(end) for target in around for end, _, _ in AROUND) == len(around) == len(AROUND)
    text = inspect.getsource(test_after_hooks_leave_other_backends_alone)
    tried = re.findall(r'hook\("([\w.]+)"\)', text)
    assert {target for target in after if any(target.endswith(end) for end in tried)} == after


# --- every release of the range, from its wheel -----------------------------------------------------------------------


class Wheel:
    """Source of one SGLang release, read without installing it."""

    def __init__(self, version: str, path: Path) -> None:
        self.version = version
        self._archive = zipfile.ZipFile(path)
        self.files = set(self._archive.namelist())
        self._trees: dict[str, ast.Module] = {}

    def text(self, file: str) -> str:
        return self._archive.read(file).decode()

    def file(self, module: str) -> str | None:
        """Path of a module's file, None if there is no such module."""
        stem = module.replace(".", "/")
        return next((name for name in (f"{stem}.py", f"{stem}/__init__.py") if name in self.files), None)

    def tree(self, file: str) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse(self.text(file))
        return self._trees[file]

    def find(self, target: str) -> tuple[ast.stmt | None, bool]:
        """Statement that binds a dotted target, and whether it is a method."""
        parts = target.split(".")
        for count in range(len(parts) - 1, 0, -1):
            file = self.file(".".join(parts[:count]))
            if file is not None:
                body, found = self.tree(file).body, None
                for name in parts[count:]:
                    found = next((node for node in statements(body) if binds(node, name)), None)
                    body = getattr(found, "body", [])
                return found, len(parts) - count > 1
        return None, False

    def has(self, module: str, name: str) -> bool:
        return self.file(f"{module}.{name}") is not None or self.find(f"{module}.{name}")[0] is not None


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, those inside `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from statements([*node.body, *node.orelse])


def binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    return isinstance(node, ast.Import | ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names)


@pytest.fixture(scope="session", params=VERSIONS)
def wheel(request: pytest.FixtureRequest) -> Wheel:
    """SGLang's wheel, fetched once into build/."""
    version = request.param
    if not list(WHEELS.glob(f"sglang-{version}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        fetched = subprocess.run([*command, "--dest", str(WHEELS), f"sglang=={version}"], capture_output=True, text=True)
        assert fetched.returncode == 0, fetched.stderr
    (path,) = WHEELS.glob(f"sglang-{version}-*.whl")
    return Wheel(version, path)


def check_parameters(seam: Seam, function: ast.FunctionDef, method: bool) -> None:
    """What a hook names must be what the target names, in the same place: callers may pass any of it by keyword."""
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    keyword_only = [argument.arg for argument in arguments.kwonlyargs]
    specs = list(inspect.signature(seam.hook).parameters.values())[1:]
    kinds = {spec.kind for spec in specs}
    ours = [spec.name for spec in specs if spec.kind is spec.POSITIONAL_OR_KEYWORD]
    named = [spec.name for spec in specs if spec.kind is spec.KEYWORD_ONLY]
    skip = 1 if method else 0  # `self` is never passed by keyword
    assert ours[skip:] == positional[skip : len(ours)]
    assert set(named) <= set(keyword_only)
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        assert len(positional) == len(ours)
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        assert set(keyword_only) == set(named)
        assert arguments.kwarg is None


@pytest.mark.network
def test_targets_in_every_release(wheel: Wheel) -> None:
    for seam in SEAMS:
        found, method = wheel.find(seam.target)
        if not seam.applies_to(wheel.version):
            continue
        assert found is not None, seam.target
        if seam.kind == "call":
            continue
        assert isinstance(found, ast.FunctionDef), seam.target
        check_parameters(seam, found, method)


# Names that our code takes only in the releases that have them.
SOME_RELEASES = {
    ("sglang.srt.runtime_context", "SpawnRanks"),
    ("sglang.srt.arg_groups.model_override_base", "get_default_attn_backend"),
    ("sglang.srt.mem_cache.unified_cache.component_type", "ComponentType"),
}


def our_imports() -> set[tuple[str, str]]:
    """Every name that our code takes from SGLang, wherever in a function it does."""
    found = set()
    for folder in ("locks_sglang", "kernels", "patches"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang" and not node.level:
                    found |= {(node.module or "", name.name) for name in node.names}
    return found


@pytest.mark.network
def test_imports_in_every_release(wheel: Wheel) -> None:
    imports = our_imports()
    assert len(imports) > 15
    assert imports >= SOME_RELEASES
    needed = imports - SOME_RELEASES | {("sglang.srt.server_args", "ATTENTION_BACKEND_CHOICES")}
    assert [name for name in sorted(needed) if not wheel.has(*name)] == []


@pytest.mark.network
def test_default_backend_is_asked_in_every_release(wheel: Wheel) -> None:
    """`dense_backend_name` asks a method of the arguments if there is one, else this function."""
    method = wheel.find("sglang.srt.server_args.ServerArgs._get_default_attn_backend")[0] is not None
    function = wheel.has("sglang.srt.arg_groups.model_override_base", "get_default_attn_backend")
    assert method != function


def fields_of(wheel: Wheel) -> set[str]:
    """Declared server arguments."""
    files = [name for name in wheel.files if name.startswith("sglang/srt/arg_groups/fields/") and name.endswith(".py")]
    text = "\n".join(wheel.text(file) for file in ["sglang/srt/server_args.py", *files])
    return set(re.findall(r"^ {4}(\w+): ", text, re.MULTILINE))


@pytest.mark.network
def test_arguments_in_every_release(wheel: Wheel) -> None:
    """The support matrix reads arguments that exist: a missing one would stop every start."""
    fields = fields_of(wheel)
    assert len(fields) > 400

    read: set[str] = set()

    class View:
        """Arguments that ask for nothing; notes what is read."""

        def __getattr__(self, name: str) -> Any:
            read.add(name)
            return {"kv_cache_dtype": "auto"}.get(name)

    check_arguments(View())
    assert len(read) > 25
    assert read - set(NOT_IN_EVERY_VERSION) <= fields
    if wheel.version == VERSIONS[-1]:
        assert set(NOT_IN_EVERY_VERSION) <= fields


@pytest.mark.network
def test_facts_of_models_in_every_release(wheel: Wheel) -> None:
    """The names that `check_model` and `check_layer` read, where SGLang sets them."""
    places = {
        "sglang/srt/model_executor/model_runner.py": ("use_mla_backend", "sliding_window_size", "token_to_kv_pool", "model"),
        "sglang/srt/configs/model_config.py": ("is_hybrid_swa", "is_encoder_decoder", "is_generation"),
        "sglang/srt/mem_cache/memory_pool.py": ("kv_cache_layout", "post_capture_active", "dtype"),
        "sglang/srt/layers/radix_attention.py": (
            *("tp_q_head_num", "tp_k_head_num", "qk_head_dim", "v_head_dim", "sliding_window_size", "layer_id", "logit_cap"),
            *("is_cross_attention", "attn_type", "pos_encoding_mode", "logit_capping_method", "xai_temperature_len"),
        ),
    }
    for file, names in places.items():
        stored = {
            node.attr
            for node in ast.walk(wheel.tree(file))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        assert set(names) <= stored, file


@pytest.mark.network
def test_backend_methods_in_every_release(wheel: Wheel) -> None:
    base = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
    assert [name for name in PUBLIC if wheel.find(f"{base}.{name}")[0] is None] == []


@pytest.mark.network
def test_graph_capture_in_every_release(wheel: Wheel) -> None:
    """What the hooks around capture make, what a replayed decode step's plan reads of its batch, and the length that inner
    backends ask of padded rows."""
    file = "sglang/srt/model_executor/runner/decode_cuda_graph_runner.py"
    (view,) = [
        node for node in ast.walk(wheel.tree(file)) if isinstance(node, ast.FunctionDef) and node.name == "build_replay_fb_view"
    ]
    given = {word.arg for call in ast.walk(view) if isinstance(call, ast.Call) for word in call.keywords}
    assert {"batch_size", "forward_mode", "num_padding", "req_pool_indices", "seq_lens", "seq_lens_cpu"} <= given
    inner = (
        *("flashinfer_backend.FlashInferAttnBackend", "triton_backend.TritonAttnBackend"),
        "flashattention_backend.FlashAttentionBackend",
    )
    for name in inner:
        padded, _ = wheel.find(f"sglang.srt.layers.attention.{name}.get_cuda_graph_seq_len_fill_value")
        assert padded is not None, name
        assert ast.unparse(padded).endswith("return 1"), name
    found, _ = wheel.find("sglang.srt.model_executor.model_runner_components.cuda_graph_setup.GraphCapture")
    assert isinstance(found, ast.ClassDef)
    fields = {node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    assert fields == {"runner", "memory_phase", "memory_usage_gb", "capture_time"}


@pytest.mark.network
def test_reports_in_every_release(wheel: Wheel) -> None:
    """What the hooks around SGLang's reports read of a reporter and a collector, and the line that they extend."""
    text = wheel.text(wheel.file(metrics.REPORTER) or "")
    for name in ("scheduler", "metrics_collector"):
        assert re.search(rf"^    {name}: ", text, re.MULTILINE), name
    for name in ("current_scheduler_metrics_enabled", "decode_log_interval", "forward_ct_decode"):
        assert f"        self.{name} = " in text, name
    assert "\nlogger = logging.getLogger(__name__)\n" in text
    decode, _ = wheel.find(f"{metrics.REPORTER}.SchedulerMetricsReporter.report_decode_stats")
    assert decode is not None
    source = ast.unparse(decode)
    assert f"msg = f'{metrics.DECODE_LINE}" in source
    assert source.count("logger.info(msg)") == 1
    assert "if self.forward_ct_decode % self.decode_log_interval != 0:\n        return" in source
    collector = wheel.text(wheel.file("sglang.srt.observability.metrics_collector") or "")
    for line in ("    _counter_cls = None\n", "    _gauge_cls = None\n", "        self.labels = labels\n"):
        assert line in collector


def test_versions_are_compared_by_their_numbers() -> None:
    assert version_key("0.5.9") < version_key("0.5.17") < version_key("0.6")
    assert version_key("0.5.17rc1") == version_key("0.5.17+cu130") == version_key("0.5.17.post1") == (0, 5, 17)
    assert version_key("1.0") > version_key("0.99.99")


def test_ranges_of_seams() -> None:
    seam = Seam("a.b", "after", lambda result: None, "", versions=("0.5.18", "0.5.22"))
    applies = [version for version in VERSIONS if seam.applies_to(version)]
    assert applies == ["0.5.18", "0.5.19", "0.5.20", "0.5.21"]
