"""What the start-up checks read of a loaded model, made by SGLang's own classes without weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.model_runner_components.load_model_utils import resolve_sliding_window_size
from starts import model_folder


def pool(dtype: torch.dtype = torch.bfloat16, layers: int = 1) -> MHATokenToKVPool:
    """A KV pool of 64 tokens on CPU."""
    return MHATokenToKVPool(64, 16, dtype, 2, 64, layers, "cpu", False)


def layer(query_heads: int = 4, head_dim: int = 64, kv_heads: int = 2, layer_id: int = 0, **settings: Any) -> RadixAttention:
    """An attention layer."""
    return RadixAttention(query_heads, head_dim, head_dim**-0.5, kv_heads, layer_id, **settings)


def runner(folder: Path, *layers: RadixAttention, kv_pool: Any = None, **config: Any) -> Any:
    """What `check_model` reads of SGLang's `ModelRunner`, made from a configuration file by SGLang as the runner does.

    Weights and a device for them are all that the real one would add; `test_runner_has_these_facts` holds the names.
    """
    model_config = ModelConfig(model_folder(folder, **config))
    model = torch.nn.Module()
    for number, made in enumerate(layers or (layer(), layer(layer_id=1))):
        model.add_module(f"attention{number}", made)
    return SimpleNamespace(
        model_config=model_config,
        model=model,
        use_mla_backend=model_config.attention_arch == AttentionArch.MLA,
        sliding_window_size=resolve_sliding_window_size(model, model_config),
        token_to_kv_pool=kv_pool or pool(),
    )
