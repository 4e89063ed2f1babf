"""GET /v1/models, POST /tokenize, POST /detokenize: what can be asked of a model without generating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import web

from gateway.directory import ModelDirectory
from gateway.openai import DetokenizeBody, TokenizeBody, parse_body, parse_json
from gateway.prompt import read_messages
from gateway.routes.body import body_of
from gateway.served_model import ServedModel
from gateway.state import GATEWAY, Gateway
from shared.errors import InvalidRequest


async def get_models(request: web.Request) -> web.Response:
    """The names under which models are served."""
    gateway = request.app[GATEWAY]
    cards = [_card(gateway, served) for served in gateway.directory.list_served()]
    return web.json_response({"object": "list", "data": cards})


async def get_model(request: web.Request) -> web.Response:
    """One of them."""
    gateway = request.app[GATEWAY]
    return web.json_response(_card(gateway, gateway.directory.find(request.match_info["model"])))


async def post_tokenize(request: web.Request) -> web.Response:
    """Token ids of a text, or of messages through the chat template."""
    gateway = request.app[GATEWAY]
    async with body_of(request) as data:
        served, ids, strings = await gateway.pool.run(lambda: _tokenize(gateway.directory, data))
    max_model_len = gateway.directory.max_model_len(served)
    answer = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings}
    return web.json_response(answer)


async def post_detokenize(request: web.Request) -> web.Response:
    """Text of token ids, control tokens included."""
    gateway = request.app[GATEWAY]
    async with body_of(request) as data:
        text, strings = await gateway.pool.run(lambda: _detokenize(gateway.directory, data))
    return web.json_response({"prompt": text} | ({} if strings is None else {"token_strs": strings}))


def _tokenize(directory: ModelDirectory, data: bytes) -> tuple[ServedModel, list[int], list[str] | None]:
    body, _ = parse_body(parse_json(data), TokenizeBody)
    served = directory.find(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt: give either prompt or messages", param="prompt")
    encoder = served.text.encoder
    if body.prompt is None:
        ids = encoder.encode_chat(read_messages(body.messages))
    else:
        ids = encoder.encode_text(body.prompt, adds_special_tokens=body.add_special_tokens is not False)
    strings = [served.text.token_text.token_name(id_) for id_ in ids] if body.return_token_strs else None
    return served, list(ids), strings


def _detokenize(directory: ModelDirectory, data: bytes) -> tuple[str, list[str] | None]:
    body, _ = parse_body(parse_json(data), DetokenizeBody)
    text = directory.find(body.model).text
    if body.tokens == []:
        return "", [] if body.return_token_strs else None
    if not isinstance(body.tokens, list) or set(map(type, body.tokens)) != {int}:
        raise InvalidRequest("tokens: must be a list of token ids", param="tokens")
    text.encoder.check_ids(body.tokens, "tokens")
    strings = [text.token_text.token_name(id_) for id_ in body.tokens] if body.return_token_strs else None
    return str(text.folder.tokenizer.decode(body.tokens, skip_special_tokens=False)), strings


def _card(gateway: Gateway, served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "quire",
        "root": served.text.folder.name if served.adapter is None else Path(served.adapter.path).name,
        "parent": None if served.adapter is None else served.adapter.model,
        "max_model_len": gateway.directory.max_model_len(served),
        "default_sampling_params": served.text.folder.defaults,
    }
