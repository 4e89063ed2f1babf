"""GET /v1/models, POST /tokenize, POST /detokenize: what can be asked of the model without generating."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.openai import DetokenizeBody, TokenizeBody, parse_body, parse_json
from gateway.prompt import read_messages
from gateway.routes.body import body_of
from gateway.state import GATEWAY, Gateway
from shared.errors import InvalidRequest


async def get_models(request: web.Request) -> web.Response:
    """The names under which the model is served."""
    gateway = request.app[GATEWAY]
    return web.json_response({"object": "list", "data": [_card(gateway, name) for name in gateway.model_names]})


async def get_model(request: web.Request) -> web.Response:
    """One of them."""
    gateway = request.app[GATEWAY]
    return web.json_response(_card(gateway, gateway.desk.check_model(request.match_info["model"])))


async def post_tokenize(request: web.Request) -> web.Response:
    """Token ids of a text, or of messages through the chat template."""
    gateway = request.app[GATEWAY]
    async with body_of(request) as data:
        ids, strings = await gateway.desk.in_pool(lambda: _tokenize(gateway, data))
    answer = {"count": len(ids), "max_model_len": _max_model_len(gateway), "tokens": ids, "token_strs": strings}
    return web.json_response(answer)


async def post_detokenize(request: web.Request) -> web.Response:
    """Text of token ids, control tokens included."""
    gateway = request.app[GATEWAY]
    async with body_of(request) as data:
        text, strings = await gateway.desk.in_pool(lambda: _detokenize(gateway, data))
    return web.json_response({"prompt": text} | ({} if strings is None else {"token_strs": strings}))


def _tokenize(gateway: Gateway, data: bytes) -> tuple[list[int], list[str] | None]:
    body, _ = parse_body(parse_json(data), TokenizeBody)
    gateway.desk.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt: give either prompt or messages", param="prompt")
    encoder = gateway.desk.encoder
    if body.prompt is None:
        ids = encoder.encode_chat(read_messages(body.messages))
    else:
        ids = encoder.encode_text(body.prompt, adds_special_tokens=body.add_special_tokens is not False)
    strings = [gateway.token_text.token_name(id_) for id_ in ids] if body.return_token_strs else None
    return list(ids), strings


def _detokenize(gateway: Gateway, data: bytes) -> tuple[str, list[str] | None]:
    body, _ = parse_body(parse_json(data), DetokenizeBody)
    gateway.desk.check_model(body.model)
    if body.tokens == []:
        return "", [] if body.return_token_strs else None
    if not isinstance(body.tokens, list) or set(map(type, body.tokens)) != {int}:
        raise InvalidRequest("tokens: must be a list of token ids", param="tokens")
    gateway.desk.encoder.check_ids(body.tokens, "tokens")
    strings = [gateway.token_text.token_name(id_) for id_ in body.tokens] if body.return_token_strs else None
    return str(gateway.folder.tokenizer.decode(body.tokens, skip_special_tokens=False)), strings


def _card(gateway: Gateway, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "quire",
        "root": gateway.folder.name,
        "parent": None,
        "max_model_len": _max_model_len(gateway),
        "default_sampling_params": gateway.folder.defaults,
    }


def _max_model_len(gateway: Gateway) -> int:
    worker = gateway.health.serving()
    own = gateway.desk.max_model_len
    return own if worker is None else min(own, worker.max_model_len)
