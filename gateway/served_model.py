"""What a name in a request's `model` stands for: the text side of a model, and perhaps an adapter."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.detokenize import TokenText
from gateway.model_folder import ModelFolder
from gateway.prompt import PromptEncoder
from shared.messages import AdapterCard


class ModelText:
    """The text side of one model: all that turns its prompts into tokens and its tokens into text. Making one takes up
    to seconds; it never changes, and threads share it.

    Args:
        folder: what the model's files say.
        max_model_len: tokens that prompt and output may have together; a worker may have less.
        card_id: names the model's card.
    """

    def __init__(self, folder: ModelFolder, max_model_len: int, card_id: str) -> None:
        self.card_id = card_id
        self.folder = folder
        self.max_model_len = max_model_len
        self.encoder = PromptEncoder(folder, max_model_len)
        self.token_text = TokenText(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One name that requests may give. `adapter`: None, the model itself."""

    name: str
    text: ModelText
    adapter: AdapterCard | None = None

    @property
    def model_name(self) -> str:
        """What the model itself is called."""
        return self.name if self.adapter is None else self.adapter.model
