"""Which models the code of `transformers` computes over our KV cache, and what their config.json says of its shape.

`WHITELIST` holds the architectures whose tokens a test compares with those of `transformers` by itself. Any other one
is refused by name: what asks all layers for keys and values of one shape, and sends attention through the registry of
`transformers` with nothing but a scale, a window and a softcap, is likely to work and can be added with its test.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from gpu_worker.model.config import FULL, SLIDING, CheckpointConfig, mixed_windows
from gpu_worker.model.config_reader import ConfigReader
from shared.errors import ConfigError, shorten

WHITELIST = (
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BioGptForCausalLM",
    "CodeGenForCausalLM",
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "CwmForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM",
    "FlexOlmoForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "GlmForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "LlamaForCausalLM",
    "MinistralForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "NemotronForCausalLM",
    "OPTForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoForCausalLM",
    "OlmoeForCausalLM",
    "PersimmonForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "PhimoeForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "VaultGemmaForCausalLM",
)

_LATENT = "its attention keeps a latent (MLA) in place of keys and values"
_STATES = "some of its layers keep a state in place of keys and values"
_ALIBI = "its attention adds a bias by distance (ALiBi)"
_OWN = "its attention does not go through the registry of transformers"
_SEVERAL = "it is no decoder of text alone"
_CODE = "its folder brings code of its own, and code from a model folder could do anything here, so it is never run"
MISFITS = {
    "BambaForCausalLM": _STATES,
    "BloomForCausalLM": _ALIBI,
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "DiffLlamaForCausalLM": _OWN,
    "FalconForCausalLM": _OWN,
    "FalconH1ForCausalLM": _STATES,
    "FalconMambaForCausalLM": _STATES,
    "GPTNeoForCausalLM": _OWN,
    "GptOssForCausalLM": "its attention has sinks",
    "GraniteMoeHybridForCausalLM": _STATES,
    "JambaForCausalLM": _STATES,
    "Lfm2ForCausalLM": _STATES,
    "Mamba2ForCausalLM": _STATES,
    "MambaForCausalLM": _STATES,
    "MiniMaxForCausalLM": _STATES,
    "MptForCausalLM": _ALIBI,
    "NemotronHForCausalLM": _STATES,
    "Qwen3NextForCausalLM": _STATES,
    "RecurrentGemmaForCausalLM": _STATES,
    "RwkvForCausalLM": _STATES,
    "XGLMForCausalLM": _OWN,
    "Zamba2ForCausalLM": _STATES,
    "ZambaForCausalLM": _STATES,
}
"""Why those do not fit that people are most likely to try; `_reason` finds others by their config.json."""

_STATE_KEYS = ("conv_L_cache", "linear_attn_config", "linear_num_key_heads", "mamba_d_state", "ssm_state_size")
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds whose frequencies are the same in every step. Those of the others follow the longest text of a batch, so that
tokens would depend on what runs beside them."""


def refuse_architecture(reader: ConfigReader, name: str, own: tuple[str, ...]) -> NoReturn:
    """Raise `ConfigError` for `name`, which neither a family file (`own`) nor the whitelist has."""
    reason, supported = _reason(reader.raw, name), ", ".join(sorted({*own, *WHITELIST}))
    why = f": {reason}" if reason else ""
    raise ConfigError(
        f"{reader.path}: architecture {shorten(name)} is not supported{why}; choose a model of another one; "
        f"supported: {supported}"
    )


def _reason(raw: Mapping[str, Any], name: str) -> str:
    if name in MISFITS:
        return MISFITS[name]
    if raw.get("is_encoder_decoder") or "vision_config" in raw or "audio_config" in raw:
        return _SEVERAL
    if "kv_lora_rank" in raw:
        return _LATENT
    kinds = raw.get("layer_types")
    if any(key in raw for key in _STATE_KEYS) or (isinstance(kinds, list) and set(map(str, kinds)) - {FULL, SLIDING}):
        return _STATES
    return _CODE if "auto_map" in raw else ""


def read_transformers(reader: ConfigReader, name: str) -> CheckpointConfig:
    """The config of a model of the whitelist, with the defaults of `transformers`.

    Raises:
        ConfigError: the package is missing or refuses it, or it asks for what does not fit.
    """
    if reader.get("quantization_config") is not None:
        reader.fail("quantization_config", "quantized checkpoints are not supported with --model-impl=transformers")
    config = open_foreign_config(reader, name)
    _check_ropes(reader, config)
    num_layers, num_heads = _size(reader, config, "num_hidden_layers"), _size(reader, config, "num_attention_heads")
    hidden_size = _size(reader, config, "hidden_size")
    num_kv_heads = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None)
    return CheckpointConfig(
        architecture=name,
        vocab_size=_size(reader, config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_inner_size(config, hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        head_size=getattr(config, "head_dim", None) or hidden_size // num_heads,
        max_position=_size(reader, config, "max_position_embeddings"),
        rms_norm_eps=0.0,
        query_scale=1.0,
        is_tied=bool(getattr(config, "tie_word_embeddings", False)),
        dtype=str(reader.get("dtype") or reader.get("torch_dtype") or "float32").removeprefix("torch."),
        windows=_read_windows(reader, config, num_layers),
        ropes=(),
        attention_softcap=getattr(config, "attn_logit_softcapping", None),
        is_foreign=True,
    )


def open_foreign_config(reader: ConfigReader, name: str) -> Any:
    """`transformers`' own config object for the architecture `name`. Raises `ConfigError`."""
    kind = foreign_class(name).config_class
    if reader.get("model_type") != kind.model_type:
        reader.fail("model_type", f"{name} has {kind.model_type!r}")
    try:
        return kind.from_pretrained(reader.path.parent, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{reader.path}: transformers refuses it: {shorten(error)}") from None


def foreign_class(name: str) -> Any:
    """`transformers`' class for the architecture `name`, which never is one that a model folder brings.

    Raises:
        ConfigError: the package is not installed, or too old to have it.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"{name} is computed by the package transformers, which is not installed; run {sys.executable} -m pip "
            "install transformers, or serve a model of an own family (docs/models.md)"
        ) from None
    found = getattr(transformers, name, None)
    if found is None:
        raise ConfigError(f"{name}: transformers {transformers.__version__} has it not; install a newer one")
    return found


def foreign_version() -> str:
    """Of the package, which is installed."""
    import transformers

    return str(transformers.__version__)


def _size(reader: ConfigReader, config: Any, key: str) -> int:
    """A size by the name that most models have; `config` knows what others call it."""
    value = getattr(config, key, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{reader.path}: {key} = {shorten(repr(value))}: must be a positive whole number")
    return value


def _inner_size(config: Any, hidden_size: int) -> int:
    """Inner numbers of a feed-forward layer that a token meets; only for guesses of what it costs."""
    names = ("intermediate_size", "n_inner", "ffn_dim")
    size: int = next((value for name in names if (value := getattr(config, name, None))), 4 * hidden_size)
    num_used = getattr(config, "num_experts_per_tok", None)
    return size if num_used is None else num_used * (getattr(config, "moe_intermediate_size", None) or size)


def _read_windows(reader: ConfigReader, config: Any, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer. Should one of them be too narrow, loading the model finds it out (`transformers_decoder.py`)."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds is None:
        return (window,) * num_layers
    other = set(kinds) - {FULL, SLIDING}
    if other or len(kinds) != num_layers:
        reader.fail("layer_types", f"must be {FULL} or {SLIDING} for each of {num_layers} layers")
    return mixed_windows(window, kinds)


def _check_ropes(reader: ConfigReader, config: Any) -> None:
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(value for value in ropes.values() if isinstance(value, dict))]:
        kind = rope.get("rope_type", "default")
        if kind not in _FIXED_ROPES:
            raise ConfigError(
                f"{reader.path}: rope_type = {shorten(repr(kind))}: not with --model-impl=transformers, where its "
                "frequencies would follow the longest text of a batch; own families have it"
            )
