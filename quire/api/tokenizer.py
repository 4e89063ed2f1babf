"""`get_tokenizer`: the deployment's own tokenizer and chat template, asked over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Post = Callable[[str, dict[str, Any]], dict[str, Any]]


class RemoteTokenizer:
    """What callers use of a tokenizer of transformers. Each call asks the deployment; for many texts load its
    tokenizer.json instead.

    Args:
        post: sends a body to a path and returns the answer.
    """

    def __init__(self, post: Post) -> None:
        self._post = post

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text in which control tokens may be spelled out."""
        asked = {"prompt": text, "add_special_tokens": add_special_tokens}
        return list(self._post("/tokenize", asked)["tokens"])

    def decode(self, token_ids: int | Sequence[int]) -> str:
        """The text of token ids, control tokens included."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self._post("/detokenize", {"tokens": ids})["prompt"])

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        return list(self._post("/detokenize", {"tokens": list(ids), "return_token_strs": True})["token_strs"])

    def apply_chat_template(
        self, conversation: Sequence[dict[str, Any]], tokenize: bool = True, **fields: Any
    ) -> str | list[int]:
        """A conversation as the model reads it, its ids or the text. The answer's beginning is always added
        (`add_generation_prompt`), and other fields are the deployment's to refuse."""
        fields = {"messages": list(conversation), **fields}
        ids = list(self._post("/tokenize", fields)["tokens"])
        return ids if tokenize else self.decode(ids)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """`input_ids` and `attention_mask` of a text."""
        ids = self.encode(text, add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}
