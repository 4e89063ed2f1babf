"""The text sides of models, by their cards: made when they are needed, forgotten when nobody has needed them for long.

A response that is being written holds what it needs by itself, so it does not end with what is forgotten here.
"""

from __future__ import annotations

import asyncio

from gateway.model_folder import read_model
from gateway.served_model import ModelText
from shared.bus import Bus
from shared.clock import Clock
from shared.errors import ConfigError, WireError
from shared.logs import get_log
from shared.model_card import unpack_card

FORGET_AFTER_S = 900.0
"""More than a request's deadline or the life of its record, by default."""

_log = get_log("gateway.library")


class ModelLibrary:
    """See the module.

    Args:
        max_model_len: what a request may have at most, None: what the model was made for.
        own: of the gateway's own model folder; never forgotten.
    """

    def __init__(self, bus: Bus, clock: Clock, *, max_model_len: int | None, own: ModelText | None) -> None:
        self._bus = bus
        self._clock = clock
        self._max_model_len = max_model_len
        self._own = own
        self._texts: dict[str, ModelText] = {} if own is None else {own.card_id: own}
        self._used_at: dict[str, float] = {}
        self._refused: dict[str, float] = {}
        self._lock = asyncio.Lock()

    def get(self, card_id: str) -> ModelText | None:
        """What has been made of a card, if it has been."""
        text = self._texts.get(card_id)
        if text is not None:
            self._used_at[card_id] = self._clock.now()
        return text

    async def load(self, card_id: str) -> ModelText | None:
        """The same, made if need be, one at a time; None when the card is not there or of no use. Raises `BusError`."""
        async with self._lock:
            text = self.get(card_id)
            if text is not None or card_id in self._refused:
                return text
            data = await self._bus.load_card(card_id)
            if data is None:
                return None
            try:
                text = await asyncio.to_thread(self._make, card_id, data)
            except (WireError, ConfigError) as error:
                _log.error("card.refused", card=card_id, error=error)
                self._refused[card_id] = self._clock.now()
                return None
            _log.info("model.known", model=text.folder.name, card=card_id)
            self._texts[card_id] = text
            return self.get(card_id)

    def forget_unused(self) -> None:
        """Drop what nobody has asked for in a while."""
        oldest = self._clock.now() - FORGET_AFTER_S
        self._refused = {card: at for card, at in self._refused.items() if at > oldest}
        for card_id, used_at in list(self._used_at.items()):
            if used_at < oldest:
                del self._used_at[card_id]
                if self._own is None or card_id != self._own.card_id:
                    del self._texts[card_id]

    def close(self) -> None:
        """End what runs beside this process for the texts."""
        for text in self._texts.values():
            text.encoder.close()

    def _make(self, card_id: str, data: bytes) -> ModelText:
        folder = read_model(unpack_card(card_id, data))
        limits = (folder.longest_text, self._max_model_len or folder.longest_text)
        return ModelText(folder, min(limits), card_id)
