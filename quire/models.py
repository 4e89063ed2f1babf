"""The models that one launcher serves: their folders and the names that clients use, from what the user gave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quire import checkpoint
from shared.adapters import parse_lora_modules
from shared.config import MAX_WORKERS_HERE, ModelConfig, ServeConfig
from shared.errors import ConfigError, shorten


def resolve_models(config: ServeConfig, cache_dir: Path, say: Callable[[str], None]) -> list[ModelConfig]:
    """Settings of each model, with its folder and at least one name.

    Args:
        say: takes progress lines.

    Raises:
        ConfigError: a folder is no checkpoint, two models have one name, or a setting is for a single model.
    """
    given = (config.model.model, *config.more_models)
    if len(given) > 1:
        _check_several(config)
    models = [_resolve(text, config.model, cache_dir, say) for text in given]
    names = [name for model in models for name in model.served_model_name]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models are called {shorten(name)}; name one of them, as NAME=FOLDER")
    return _give_adapters(models) if len(models) > 1 else models


def for_gateways(models: list[ModelConfig]) -> ModelConfig:
    """What gateways are told: of one model everything, of several the names that workers will bring."""
    if len(models) == 1:
        return models[0]
    names = tuple(name for model in models for name in model.served_model_name)
    return ModelConfig(served_model_name=names, max_model_len=models[0].max_model_len)


def _give_adapters(models: list[ModelConfig]) -> list[ModelConfig]:
    """`models`, each with those of `--lora-modules` that are for it."""
    texts, names = models[0].lora_modules, [name for model in models for name in model.served_model_name]
    bases = [module.model for module in parse_lora_modules(texts)]
    for text, base in zip(texts, bases, strict=True):
        if base not in names:
            raise ConfigError(f"--lora-modules={shorten(text)}: there are several models; give it as JSON, with one of "
                              f"{shorten(', '.join(names))} as base_model_name")  # fmt: skip
    return [
        replace(model, lora_modules=tuple(
            text for text, base in zip(texts, bases, strict=True) if base in model.served_model_name
        ))
        for model in models
    ]  # fmt: skip


def _check_several(config: ServeConfig) -> None:
    """Refuse what is for one model only."""
    if config.model.served_model_name:
        shown = shorten(" ".join(config.model.served_model_name))
        raise ConfigError(f"--served-model-name={shown}: there are several models; name each, as NAME=FOLDER")
    if config.model.tokenizer:
        raise ConfigError(f"--tokenizer={shorten(config.model.tokenizer)}: there are several models; put the tokenizer "
                          "of each into its folder")  # fmt: skip
    if config.scaling.autoscale:
        raise ConfigError(f"--autoscale={shorten(config.scaling.autoscale)}: is for one model; give --workers, which "
                          "start for each of several models")  # fmt: skip
    if (total := config.workers * (1 + len(config.more_models))) > MAX_WORKERS_HERE:
        raise ConfigError(f"--workers={config.workers}: with {1 + len(config.more_models)} models that makes {total}, "
                          f"at most {MAX_WORKERS_HERE} run on one machine")  # fmt: skip


def _resolve(text: str, model: ModelConfig, cache_dir: Path, say: Callable[[str], None]) -> ModelConfig:
    name, separator, folder_text = text.partition("=")
    is_named = bool(name and separator and folder_text) and "/" not in name and not Path(text).exists()
    if is_named and model.served_model_name:
        raise ConfigError(f"{shorten(text)} names the model, and so does --served-model-name; leave one of them out")
    given = folder_text if is_named else text
    folder = checkpoint.resolve(given, cache_dir, say, needs_tokenizer=not model.tokenizer)
    names = (name,) if is_named else model.served_model_name or (folder.name,)
    found = replace(model, model=str(folder), served_model_name=names)
    found.files().check()
    return found
