"""Which folder each file of a model lies in: the model's own, unless flags name others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError, shorten

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
GENERATION_FILE = "generation_config.json"
AUTO, NO_DEFAULTS = "auto", "vllm"
"""Words of `--generation-config` that are no folder: the model's own, and none of its sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Folders of a model's files.

    Args:
        model: its folder.
        tokenizer: of `--tokenizer`; "": the model's.
        generation_config: of `--generation-config`.
    """

    model: Path
    tokenizer: str = ""
    generation_config: str = AUTO

    @property
    def has_defaults(self) -> bool:
        """Whether requests get the sampling that the model's author wants."""
        return self.generation_config != NO_DEFAULTS

    def path(self, name: str) -> Path:
        """Where the file `name` is, if it is there."""
        if self.tokenizer and name in TOKENIZER_FILES:
            return Path(self.tokenizer) / name
        if name == GENERATION_FILE and self.generation_config not in (AUTO, NO_DEFAULTS):
            return Path(self.generation_config) / name
        return self.model / name

    def check(self) -> None:
        """Raise `ConfigError` unless there is what must be there."""
        for flag, folder, needed in (
            ("model", str(self.model), "config.json"),
            ("tokenizer" if self.tokenizer else "model", self.tokenizer or str(self.model), "tokenizer.json"),
        ):
            if not self.path(needed).is_file():
                kind = "not a model folder (it needs config.json and tokenizer.json)" if flag == "model" else (
                    "not a folder with a tokenizer.json; name one, or leave it out for the model's own")  # fmt: skip
                raise ConfigError(f"--{flag} {shorten(folder)}: {kind}")
        if self.generation_config not in (AUTO, NO_DEFAULTS) and not self.path(GENERATION_FILE).is_file():
            raise ConfigError(
                f"--generation-config={shorten(self.generation_config)}: not a folder with a {GENERATION_FILE}; name "
                f"one, or {AUTO} (the model's) or {NO_DEFAULTS} (none)"
            )
