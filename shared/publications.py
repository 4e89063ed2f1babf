"""What travels in a gateway's channel: batches of `TokenChunk` and `RequestEnded`, nothing else."""

from __future__ import annotations

from shared import wire
from shared.bus import ChannelMessage
from shared.errors import WireError
from shared.messages import RequestEnded, TokenChunk


def decode_publication(data: bytes) -> list[ChannelMessage]:
    """The messages of one publication, in commit order.

    Raises:
        WireError: not a batch of messages, or one that does not belong there.
    """
    messages = wire.decode_batch(data)
    known = [m for m in messages if isinstance(m, TokenChunk | RequestEnded)]
    if len(known) != len(messages):
        raise WireError("a message that does not belong in a gateway's channel")
    return known
