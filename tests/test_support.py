"""The support matrix: every refusal with its message, from SGLang's real arguments, model configurations, layers and pools."""

import argparse
import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from models import layer, pool, runner
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.server_args import ServerArgs
from starts import SGLANG, Start, fake_sglang, model_folder, start_all

from locks_sglang.config import NAMES, flag_name
from locks_sglang.seams import version_key
from locks_sglang.support import (
    CPU_VERIFIED,
    EVALUATION_IN_GRAPHS,
    FEATURES,
    FLASHINFER_HEAD_DIMS,
    GPU_VERIFIED,
    GRAPHS_WITHOUT_KERNELS,
    NOT_IN_EVERY_VERSION,
    PAGE_SIZES,
    SHORT_WITHOUT_GRAPHS,
    Feature,
    UnsupportedError,
    attend_path,
    check_layer,
    check_model,
    check_version,
    markdown_matrix,
    verification_level,
)

TABLE = {feature.name: feature for feature in FEATURES}
LATE = version_key(SGLANG) >= version_key("0.5.20")


class Case(NamedTuple):
    """A refused feature, how to ask for it, and what the message says was found."""

    feature: str
    flags: list[str]
    found: str


SPLIT = "different prefill and decode attention backends"
PAGES = "a page size outside 16, 32, 64, 128, 256"
DISAGGREGATION = "PD disaggregation"
PARALLEL = "tensor, pipeline or data parallelism"
CONTEXT = "context parallelism"
OWN_ATTENTION = "HiSparse, diffusion LLMs or multi-item scoring"
EXTERNAL = "an external KV cache layer (LMCache, FlexKV, a cache linker, a custom radix cache)"
SESSIONS = "streaming sessions and the session radix cache"
ENCODER = "an encoder, embedding or cross-attention model"
QUANTIZED = "a quantised KV cache"
TRANSFORMERS = "a model that SGLang takes from transformers"
PAGE_MAJOR = "page-major KV layouts and unified memory"

ARGUMENTS = [
    Case(SPLIT, ["--prefill-attention-backend", "torch_native"], "prefill torch_native, decode locks"),
    Case(SPLIT, ["--decode-attention-backend", "torch_native"], "prefill locks, decode torch_native"),
    *[Case(PAGES, ["--page-size", size], f"page_size={size}") for size in ("1", "7", "24", "512")],
    Case("speculative decoding", ["--speculative-algorithm", "NGRAM"], "speculative_algorithm=NGRAM"),
    *[
        Case(
            "speculative decoding",
            ["--speculative-algorithm", name, "--speculative-draft-model-path", "draft"],
            f"speculative_algorithm={name}",
        )
        for name in ("EAGLE", "EAGLE3", "STANDALONE")
    ],
    Case(DISAGGREGATION, ["--disaggregation-mode", "decode"], "disaggregation_mode=decode"),
    Case(DISAGGREGATION, ["--disaggregation-mode", "prefill"], "disaggregation_mode=prefill"),
    Case("the hierarchical cache (HiCache)", ["--enable-hierarchical-cache"], "enable_hierarchical_cache=True"),
    Case(QUANTIZED, ["--kv-cache-dtype", "fp8_e5m2"], "kv_cache_dtype=fp8_e5m2"),
    Case(QUANTIZED, ["--kv-cache-dtype", "fp8_e4m3"], "kv_cache_dtype=fp8_e4m3"),
    Case(PARALLEL, ["--tp-size", "2"], "tp_size=2"),
    Case(PARALLEL, ["--pp-size", "2"], "pp_size=2"),
    Case(PARALLEL, ["--dp-size", "2"], "dp_size=2"),
    Case(CONTEXT, ["--dcp-size", "2"], "dcp_size=2"),
    Case(CONTEXT, ["--attn-cp-size", "2"], "attn_cp_size=2"),
    Case(CONTEXT, ["--enable-prefill-cp", "--cp-strategy", "zigzag"], "enable_prefill_cp=True"),
    Case("two-batch overlap or pdmux", ["--enable-two-batch-overlap"], "enable_two_batch_overlap=True"),
    Case("two-batch overlap or pdmux", ["--enable-pdmux"], "enable_pdmux=True"),
    Case("a full CUDA graph for prefill", ["--cuda-graph-backend-prefill", "full"], "prefill graph: full"),
    Case("torch.compile", ["--enable-torch-compile"], "enable_torch_compile=True"),
    Case("LoRA", ["--enable-lora"], "enable_lora=True"),
    Case("LoRA", ["--lora-paths", "a=folder"], "lora_paths="),
    Case(SESSIONS, ["--enable-streaming-session"], "enable_streaming_session=True"),
    Case(SESSIONS, ["--enable-session-radix-cache"], "enable_session_radix_cache=True"),
    Case("the memory saver", ["--enable-memory-saver"], "enable_memory_saver=True"),
    Case(OWN_ATTENTION, ["--enable-hisparse"], "enable_hisparse=True"),
    Case(OWN_ATTENTION, ["--dllm-algorithm", "LowConfidence"], "dllm_algorithm=LowConfidence"),
    Case(OWN_ATTENTION, ["--enable-mis"], "enable_mis=True"),
    Case(EXTERNAL, ["--enable-lmcache"], "enable_lmcache=True"),
    Case(EXTERNAL, ["--enable-flexkv"], "enable_flexkv=True"),
    Case(EXTERNAL, ["--radix-cache-backend", "other"], "radix_cache_backend=other"),
    Case(ENCODER, ["--is-embedding"], "is_embedding=True"),
    Case("deterministic inference", ["--enable-deterministic-inference"], "enable_deterministic_inference=True"),
    Case(TRANSFORMERS, ["--model-impl", "transformers"], "model_impl=transformers"),
    Case(PAGE_MAJOR, ["--enable-unified-memory"], "enable_unified_memory=True"),
    Case(PAGE_MAJOR, ["--enable-page-major-kv-layout"], "enable_page_major_kv_layout=True"),
]
if LATE:
    ARGUMENTS += [
        Case(DISAGGREGATION, ["--enable-pd-role-switch"], "enable_pd_role_switch=True"),
        Case(EXTERNAL, ["--enable-unified-cache-external-linker"], "enable_unified_cache_external_linker=True"),
    ]

ACCEPTED = {
    "plain": [],
    "the same backend for both": ["--prefill-attention-backend", "locks", "--decode-attention-backend", "locks"],
    "mixed chunk": ["--enable-mixed-chunk"],
    "no radix cache": ["--disable-radix-cache"],
    "bf16": ["--kv-cache-dtype", "bfloat16"],
    "breakable prefill graph": ["--cuda-graph-backend-prefill", "breakable"],
    **{f"page size {size}": ["--page-size", str(size)] for size in PAGE_SIZES},
}


def name_of(case: Case) -> str:
    return " ".join(case.flags) or case.feature


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Start]:
    """Every start of this file, by its flags or its name."""
    folder = tmp_path_factory.mktemp("starts")
    locks = ["--attention-backend", "locks"]
    attempts = {name_of(case): ([*locks, *case.flags], {}) for case in ARGUMENTS}
    attempts |= {name: ([*locks, *flags], {}) for name, flags in ACCEPTED.items()}
    attempts["too new"] = (locks, {"PYTHONPATH": fake_sglang(folder / "new", "0.6.0")})
    outcomes = start_all(model_folder(folder / "model"), list(attempts.values()))
    return dict(zip(attempts, outcomes, strict=True))


def expected(feature: Feature, found: str) -> str:
    return f"locks does not support {feature.name} ({found}): {feature.reason}. {feature.way_out}."


@pytest.mark.parametrize("case", ARGUMENTS, ids=name_of)
def test_refused_arguments(starts: dict[str, Start], case: Case) -> None:
    """Refused when SGLang resolves its arguments: the folder that these starts name holds no weights."""
    start = starts[name_of(case)]
    assert start.error == "UnsupportedError"
    if case.found.endswith("="):
        assert start.message.startswith(f"locks does not support {case.feature} ({case.found}")
        assert start.message.endswith(f"): {TABLE[case.feature].reason}. {TABLE[case.feature].way_out}.")
    else:
        assert start.message == expected(TABLE[case.feature], case.found)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_arguments(starts: dict[str, Start], name: str) -> None:
    start = starts[name]
    assert (start.error, start.message, start.backend) == ("", "", "locks")
    given = name.startswith("page size")
    assert start.page_size == (int(name.split()[-1]) if given else 16)
    assert start.log.count("locks: --page-size is 16 ") == (0 if given else 1)  # an automatic choice is logged, once


# --- models -----------------------------------------------------------------------------------------------------------


def hnd_pool() -> MHATokenToKVPool:
    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        return pool()


def late_pool() -> MHATokenToKVPool:
    made = pool()
    made.post_capture_active = True  # SGLang reserves such a pool through CUDA alone
    return made


def mla_pool() -> MLATokenToKVPool:
    return MLATokenToKVPool(64, 16, torch.bfloat16, 512, 64, 1, "cpu", False)


def with_window_pool(folder: Path) -> Any:
    made = runner(folder)
    made.model_config.is_hybrid_swa = True
    return made


def with_sinks(folder: Path) -> Any:
    made = runner(folder)
    made.model.attention1.sinks = torch.nn.Parameter(torch.zeros(4))
    return made


def from_transformers(folder: Path) -> Any:
    """With `--model-impl auto` SGLang chooses this form for a model that it has no implementation of its own for."""
    made = runner(folder, layer())
    held = dict(enumerate(made.model.children()))
    made.model = type("TransformersForCausalLM", (torch.nn.Module,), {"attention_instances": held})()
    return made


MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, "sliding_window": 128}
LLAMA4 = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}

MODELS: list[tuple[str, str, Callable[[Path], Any]]] = [
    ("multi-head latent attention (MLA)", "MLA attention", lambda at: runner(at, **MLA)),
    (
        "a hybrid linear-attention model",
        "Qwen3NextConfig",
        lambda at: runner(at, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next"),
    ),
    (
        "a hybrid linear-attention model",
        "FalconH1Config",
        lambda at: runner(at, architectures=["FalconH1ForCausalLM"], model_type="falcon_h1"),
    ),
    ("sliding-window attention", "window of 128", lambda at: runner(at, **GPT_OSS)),
    ("sliding-window attention", "hybrid window pool", with_window_pool),
    ("sliding-window attention", "window of 8192", lambda at: runner(at, **LLAMA4)),
    (
        "sliding-window attention",
        "layer 1: window of 511",
        lambda at: runner(at, layer(), layer(layer_id=1, sliding_window_size=511)),
    ),
    (
        ENCODER,
        "embedding or encoder",
        lambda at: runner(at, architectures=["BertModel"], model_type="bert"),
    ),
    (
        ENCODER,
        "encoder-decoder",
        lambda at: runner(at, architectures=["WhisperForConditionalGeneration"], model_type="whisper"),
    ),
    (
        ENCODER,
        "layer 1: cross-attention",
        lambda at: runner(at, layer(), layer(layer_id=1, is_cross_attention=True)),
    ),
    (
        "a multimodal model",
        "multimodal",
        lambda at: runner(at, architectures=["Qwen2VLForConditionalGeneration"], model_type="qwen2_vl"),
    ),
    ("attention sinks (learned logits)", "attention1.sinks", with_sinks),
    ("this kind of KV pool", "MLATokenToKVPool", lambda at: runner(at, kv_pool=mla_pool())),
    ("this kind of KV pool", "layout hnd", lambda at: runner(at, kv_pool=hnd_pool())),
    ("this kind of KV pool", "sized after graph capture", lambda at: runner(at, kv_pool=late_pool())),
    (QUANTIZED, "pool of float8_e4m3fn", lambda at: runner(at, kv_pool=pool(torch.float8_e4m3fn))),
    (QUANTIZED, "pool of float8_e5m2", lambda at: runner(at, kv_pool=pool(torch.float8_e5m2))),
    (
        "layers of different shapes",
        "4/1 heads of 64/64, 4/2 heads of 64/64",
        lambda at: runner(at, layer(), layer(kv_heads=1, layer_id=1)),
    ),
    (TRANSFORMERS, "TransformersForCausalLM", from_transformers),
    ("layers without attention", "layers 1", lambda at: runner(at, layer(), kv_pool=pool(layers=2))),
    (
        "this head dimension",
        "layer 0: head dimension 80",
        lambda at: runner(at, layer(head_dim=80), hidden_size=320),
    ),
]

LAYERS = [
    ("this head dimension", {"head_dim": 80}, "head dimension 80"),
    ("this head dimension", {"head_dim": 32}, "head dimension 32"),
    ("this head dimension", {"head_dim": 128, "v_head_dim": 192}, "head dimension 128, 192"),
    ("this number of query heads", {"query_heads": 32, "kv_heads": 1}, "32 query heads, 1 KV heads"),
    ("this number of query heads", {"query_heads": 5, "kv_heads": 2}, "5 query heads, 2 KV heads"),
    ("sliding-window attention", {"sliding_window_size": 4095}, "window of 4095"),
    ("sliding-window attention", {"sliding_window_size": 1}, "window of 1"),
    (ENCODER, {"is_cross_attention": True}, "cross-attention"),
    (ENCODER, {"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only"),
    (ENCODER, {"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "decoder_bidirectional"),
    ("this attention variant", {"pos_encoding_mode": "ALIBI"}, "position encoding ALIBI"),
    ("a logit soft cap", {"logit_cap": 30.0}, "cap of 30.0"),
]


@pytest.mark.parametrize(("name", "found", "make"), MODELS, ids=[f"{name}: {found}" for name, found, _ in MODELS])
def test_refused_models(tmp_path: Path, name: str, found: str, make: Callable[[Path], Any]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_model(make(tmp_path))
    assert str(caught.value) == expected(TABLE[name], found)


@pytest.mark.parametrize(("name", "settings", "found"), LAYERS, ids=[f"{name}: {found}" for name, _, found in LAYERS])
def test_refused_layers(name: str, settings: dict[str, Any], found: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_layer(layer(layer_id=7, **settings), None)
    assert str(caught.value) == expected(TABLE[name], f"layer 7: {found}")


def test_refused_layer_with_scaled_temperature() -> None:
    """As Grok's layers get it, after they are made."""
    made = layer(layer_id=7)
    made.xai_temperature_len = 1024
    with pytest.raises(UnsupportedError) as caught:
        check_layer(made, None)
    assert str(caught.value) == expected(TABLE["this attention variant"], "layer 7: temperature length 1024")


def test_refused_sinks_of_a_call() -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_layer(layer(layer_id=7), torch.zeros(4))
    assert str(caught.value) == expected(TABLE["attention sinks (learned logits)"], "layer 7")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_accepted_models(tmp_path: Path, dtype: torch.dtype) -> None:
    check_model(runner(tmp_path, kv_pool=pool(dtype)))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 6, 7, 16])
def test_accepted_layers(head_dim: int, group: int) -> None:
    check_layer(layer(2 * group, head_dim), None)


def assigned(source: str, owner: str) -> set[str]:
    """Attributes that a class of this source file sets on `self` or declares."""
    tree = ast.parse(Path(source).read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    stored = {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return stored | {
        node.target.id for node in body.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_runner_has_these_facts() -> None:
    """The stand-in above has the names that the real runner sets: a renamed one would never be noticed otherwise."""
    import sglang.srt.model_executor as package

    names = assigned(str(Path(package.__path__[0]) / "model_runner.py"), "ModelRunner")
    assert names >= {"model_config", "model", "use_mla_backend", "sliding_window_size", "token_to_kv_pool"}


def test_models_from_transformers_keep_their_attention_where_they_are_told_by() -> None:
    import sglang.srt.models.transformers as module

    assert "attention_instances" in assigned(module.__file__, "TransformersBase")
    assert module.TransformersForCausalLM.__name__ in {name for _, name, _ in MODELS}


def test_models_keep_sinks_under_known_names() -> None:
    """Every model that hands sinks to its attention keeps them where `check_model` looks."""
    import sglang.srt.models as package

    names = set()
    for file in Path(package.__path__[0]).glob("*.py"):
        text = file.read_text()
        names |= set(re.findall(r"sinks=self\.(\w+)", text))
        assert len(re.findall(r"\bsinks=(?!self\.)\w+", text)) == 0, file
    assert {"sinks", "attention_sink_bias"} == names


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.5.16", "0.5.16.post3", "0.5.24", "0.5.24rc1", "0.6.0", "1.0", "0.4.10"])
def test_refused_versions(version: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_version(version)
    assert str(caught.value) == (
        f"locks does not support SGLang {version}: it needs 0.5.17 to below 0.5.24. pip install 'sglang>=0.5.17,<0.5.24'"
    )


@pytest.mark.parametrize("version", ["0.5.17", "0.5.17.post1", "0.5.20", "0.5.23", "0.5.23.post1", "0.5.23+cu130"])
def test_accepted_versions(version: str) -> None:
    check_version(version)


def test_a_too_new_sglang_stops_the_start(starts: dict[str, Start]) -> None:
    assert starts["too new"].error == "UnsupportedError"
    assert starts["too new"].message.startswith("locks does not support SGLang 0.6.0: it needs 0.5.17 to below 0.5.24.")


def test_verification_levels() -> None:
    for version in CPU_VERIFIED + GPU_VERIFIED:
        check_version(version)
    levels = {verification_level(version) for version in CPU_VERIFIED}
    assert levels <= {"CPU-verified", "GPU-verified"}
    assert all(verification_level(version) == "GPU-verified" for version in GPU_VERIFIED)
    assert verification_level("0.5.20") == "unverified"
    assert verification_level(CPU_VERIFIED[-1] + "+local") == verification_level(CPU_VERIFIED[-1])


# --- the table --------------------------------------------------------------------------------------------------------


def probed_by() -> dict[str, set[str]]:
    """Features by the tests that ask for them."""
    return {
        "test_refused_arguments": {case.feature for case in ARGUMENTS},
        "test_refused_models": {name for name, _, _ in MODELS},
        "test_refused_layers": {name for name, _, _ in LAYERS},
        "test_graphs_are_refused_without_kernels": {GRAPHS_WITHOUT_KERNELS.name},
        "test_dense_graphs_are_refused_without_an_inner_backend": {SHORT_WITHOUT_GRAPHS.name},
        "test_graphs_are_refused_in_evaluation": {EVALUATION_IN_GRAPHS.name},
    }


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_row(feature: Feature) -> None:
    """Every cell names a test that exists, and every way to ask for something refused is tried."""
    file, _, function = feature.test.partition("::")
    tree = ast.parse((Path(__file__).parents[1] / file).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    probes = {"arguments": feature.arguments, "models": feature.model, "layers": feature.layer}
    used = {name for name, probe in probes.items() if probe is not None}
    if feature.status != "refused":
        assert feature.status in ("works", "dense")
        assert not used
        assert not feature.reason
        return
    assert feature.reason
    assert feature.way_out
    tried = probed_by()
    assert feature.name in tried[function]
    assert all(feature.name in tried[f"test_refused_{name}"] for name in used)
    assert used or feature in (GRAPHS_WITHOUT_KERNELS, SHORT_WITHOUT_GRAPHS, EVALUATION_IN_GRAPHS)


def test_rows_are_distinct() -> None:
    assert len(TABLE) == len(FEATURES)


def test_way_outs_name_flags_that_exist() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    known |= {flag_name(name) for name in NAMES}
    optional = {"--" + name.replace("_", "-") for name in NOT_IN_EVERY_VERSION}
    for feature in FEATURES:
        assert set(re.findall(r"--[\w-]+", feature.way_out)) <= known | optional, feature.name
        for variable in re.findall(r"SGLANG_\w+", feature.way_out):
            assert hasattr(envs, variable)


def test_matrix_has_a_line_a_row() -> None:
    lines = markdown_matrix().splitlines()
    assert len(lines) == 2 + len(FEATURES)
    for feature, line in zip(FEATURES, lines[2:], strict=True):
        assert line.startswith(f"| {feature.name} | {feature.status} | ")


def test_what_attends() -> None:
    """FlashInfer where it can, else the Triton kernel, and without kernels the reference; each with its reason."""
    flash = (True, "bfloat16", (128, 128), 0.0, True)
    assert attend_path(*flash).name == "flashinfer"
    for dim in FLASHINFER_HEAD_DIMS:
        assert attend_path(True, "float16", (dim, dim), 0.0, True).name == "flashinfer"
    for at, value, reason in (
        (1, "float32", "not for float32"),
        (1, "float8_e4m3fn", "not for float8_e4m3fn"),
        (2, (96, 96), "not for 96/96"),
        (2, (128, 64), "not for 128/64"),
        (3, 30.0, "soft cap"),
        (4, False, "not installed"),
    ):
        path = attend_path(*flash[:at], value, *flash[at + 1 :])
        assert path.name == "triton"
        assert reason in path.reason
    assert attend_path(False, *flash[1:]).name == "reference"
