"""From the bytes of a POST to a request that can be stored: parse, check, render, tokenize, resolve, and refuse.

Refusals in order: what is wrong in itself (400), nothing serves now (503), what can never fit (400). Documented
choices: `max_tokens` that does not fit beside the prompt is refused, never shortened; absent, it is 16 for completions
and what fits for chat, unless the model's generation_config.json says a smaller number. A missing seed is drawn here,
so that the record holds all that the tokens depend on.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import orjson

from gateway import limits
from gateway.directory import ModelDirectory
from gateway.generation_defaults import with_defaults
from gateway.openai import ChatBody, CompletionBody, parse_body, parse_json
from gateway.prompt import context_error, read_messages, read_prompts
from gateway.served_model import ModelText, ServedModel
from gateway.text_pool import TextPool
from shared.capacity import fits, most_tokens, never_fits_message
from shared.clock import unix_now
from shared.errors import InvalidRequest, shorten
from shared.ids import RequestId, new_request_id, new_seed
from shared.messages import RequestBody, SamplingParams, SubmitRequest, WorkerHello

COMPLETION_MAX_TOKENS = 16
_SEED_MASK = 2**63 - 1

GenerateRequest = CompletionBody | ChatBody

SHORT_BODY_BYTES = 4096
"""A completion's body up to this size is read on the event loop: 0.1 to 0.5 ms, where a thread and back costs 0.2 ms of
CPU. Chats wait for their template's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """A checked request. `body_hash` is over the JSON as sent; `ignored` names fields that change nothing; `priority`
    and `user` are for the scheduler only."""

    request_id: RequestId
    served: ServedModel
    body: RequestBody
    body_hash: str
    ignored: list[str]
    priority: int = 0
    user: str = ""

    def summary(self, *, tenant: str, worker: WorkerHello, timeout_s: float) -> SubmitRequest:
        """What the scheduler needs to know; `worker` is one that may run it."""
        return SubmitRequest(
            request_id=self.request_id,
            tenant=tenant,
            model=worker.model,
            fingerprint=worker.fingerprint,
            prompt_lens=tuple(len(prompt) for prompt in self.body.prompts),
            n=self.body.n,
            max_tokens=self.body.sampling.max_tokens,
            timeout_s=timeout_s,
            priority=self.priority,
            user=self.user,
        )


@dataclass(frozen=True, slots=True)
class _Read:
    request: GenerateRequest
    served: ServedModel
    ignored: list[str]
    prompts: tuple[tuple[int, ...], ...]
    logit_bias: tuple[tuple[int, float], ...]
    stop_token_ids: tuple[int, ...]
    body_hash: str


class IntakeDesk:
    """Makes an `Intake` of each POST.

    Args:
        directory: the models that may be asked for.
        has_price: what a request costs can be told.
    """

    def __init__(self, *, directory: ModelDirectory, pool: TextPool, has_price: bool = False) -> None:
        self._directory = directory
        self._pool = pool
        self._has_price = has_price

    async def take(self, kind: str, data: bytes) -> tuple[Intake, WorkerHello]:
        """The request in `data`, and the worker it was checked against.

        Raises:
            InvalidRequest, NotFound: the request is wrong.
            Overloaded: no worker lives.
        """
        is_short = len(data) <= SHORT_BODY_BYTES and kind != "chat"
        read = self._read(kind, data) if is_short else await self._pool.run(lambda: self._read(kind, data))
        longest = max(map(len, read.prompts))
        self._check_context(read.request, longest, read.served.text.max_model_len)
        worker = self._directory.require_worker(read.served)
        max_tokens = self._resolve_max_tokens(read, longest, worker)
        return self._build(kind, read, max_tokens), worker

    def _read(self, kind: str, data: bytes) -> _Read:
        """The part that takes its time; in a thread of the pool unless the body is short."""
        raw = parse_json(data)
        body_class: type[ChatBody] | type[CompletionBody] = ChatBody if kind == "chat" else CompletionBody
        request, ignored = parse_body(raw, body_class)
        served = self._directory.find(request.model)
        request = with_defaults(request, served.text.folder.defaults)
        self._check_cost(request)
        bias = _resolve_bias(request.logit_bias or {}, served.text)
        stop_ids = _resolve_stop_ids(request, served.text)
        return _Read(
            request, served, ignored, _read_prompts(request, served.text), bias, stop_ids, hash_body(kind, raw)
        )

    def _check_cost(self, request: GenerateRequest) -> None:
        if request.include_cost and not self._has_price:
            text = "include_cost: this server does not know what a worker costs; start it with --price-per-hour"
            raise InvalidRequest(text, param="include_cost")

    def _check_context(self, request: GenerateRequest, longest: int, max_model_len: int) -> None:
        """The longest prompt and the least output that was asked for must fit; one token if nothing was."""
        wanted = max(request.token_limit or 1, request.min_tokens or 0)
        if longest + wanted > max_model_len:
            shown = wanted if longest < max_model_len else None
            raise context_error(str(longest), shown, max_model_len, _prompt_field(request))

    def _resolve_max_tokens(self, read: _Read, longest: int, worker: WorkerHello) -> int:
        """`max_tokens`, checked against what the largest living worker can hold."""
        request = read.request
        max_model_len = min(read.served.text.max_model_len, worker.max_model_len)
        self._check_context(request, longest, max_model_len)
        room = max_model_len - longest
        limit = request.token_limit
        if limit is None:
            in_pool = most_tokens(**_sizes(worker), limit=max_model_len) - longest
            most = read.served.text.folder.defaults.get("max_tokens", room)
            wanted = COMPLETION_MAX_TOKENS if isinstance(request, CompletionBody) else in_pool
            limit = min(room, wanted, most)
            limit = max(limit, request.min_tokens or 0, 1)
        check_fits(worker, longest + limit, _prompt_field(request))
        return limit

    def _build(self, kind: str, read: _Read, max_tokens: int) -> Intake:
        request = read.request
        options, adapter = request.stream_options, read.served.adapter
        body = RequestBody(
            kind=kind,
            model=read.served.name,
            created=unix_now(),
            prompts=read.prompts,
            n=request.num_samples,
            sampling=self._resolve_sampling(read, max_tokens),
            stop=request.stop_strings,
            stream=bool(request.stream),
            include_usage=bool((options and options.include_usage) or (request.stream and request.include_cost)),
            include_cost=bool(request.include_cost),
            cache_salt=request.cache_salt or "",
            num_returned=(request.n or 1) if request.is_choosy else None,
            hides_logprobs=request.is_choosy and request.num_logprobs is None,
            card=read.served.text.card_id,
            returns_token_ids=bool(request.return_token_ids),
            names_tokens_by_id=bool(request.return_tokens_as_token_ids),
            adapter="" if adapter is None else adapter.content,
            adapter_path="" if adapter is None else adapter.path,
        )
        return Intake(
            request_id=new_request_id(kind),
            served=read.served,
            body=body,
            body_hash=read.body_hash,
            ignored=read.ignored,
            priority=request.priority or 0,
            user=request.user or "",
        )

    def _resolve_sampling(self, read: _Read, max_tokens: int) -> SamplingParams:
        request = read.request
        least_logprobs = 0 if request.is_choosy else None
        return SamplingParams(
            seed=new_seed() if request.seed in (None, -1) else (request.seed or 0) & _SEED_MASK,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens or 0,
            temperature=_or(request.temperature, 1.0),
            top_p=_or(request.top_p, 1.0),
            top_k=min(max(request.top_k or 0, 0), read.served.text.folder.vocab_size),
            min_p=_or(request.min_p, 0.0),
            presence_penalty=_or(request.presence_penalty, 0.0),
            frequency_penalty=_or(request.frequency_penalty, 0.0),
            repetition_penalty=_or(request.repetition_penalty, 1.0),
            logit_bias=read.logit_bias,
            stop_token_ids=read.stop_token_ids,
            num_logprobs=least_logprobs if request.num_logprobs is None else request.num_logprobs,
        )


def _read_prompts(request: GenerateRequest, text: ModelText) -> tuple[tuple[int, ...], ...]:
    if isinstance(request, ChatBody):
        return (text.encoder.encode_chat(read_messages(request.messages)),)
    prompts = read_prompts(request.prompt)
    if len(prompts) * request.num_samples > limits.MAX_CHOICES:
        field = "n" if request.best_of is None else "best_of"
        choices = f"{len(prompts)} prompts times {field} {request.num_samples}"
        raise InvalidRequest(f"{field}: {choices} is more than {limits.MAX_CHOICES} choices", param=field)
    return tuple(text.encoder.encode(prompt) for prompt in prompts)


def _resolve_bias(raw: dict[str, float], text: ModelText) -> tuple[tuple[int, float], ...]:
    bias = {_token_id("logit_bias", key, text): float(value) for key, value in raw.items()}
    return tuple(sorted(bias.items()))


def _resolve_stop_ids(request: GenerateRequest, text: ModelText) -> tuple[int, ...]:
    asked = {_token_id("stop_token_ids", str(id_), text) for id_ in request.stop_token_ids or ()}
    return tuple(sorted(asked if request.ignore_eos else asked | set(text.folder.eos_ids)))


def _token_id(field: str, value: str, text: ModelText) -> int:
    top = text.folder.max_token_id
    if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value) <= top):
        raise InvalidRequest(f"{field}: {shorten(value)!r} is not a token id (0 to {top})", param=field)
    return int(value)


def _prompt_field(request: GenerateRequest) -> str:
    return "messages" if isinstance(request, ChatBody) else "prompt"


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def check_fits(worker: WorkerHello, num_tokens: int, param: str) -> None:
    """Raise `InvalidRequest` when a sequence of `num_tokens` can never run on `worker`."""
    if not fits(num_tokens, **_sizes(worker)):
        message = never_fits_message(num_tokens, **_sizes(worker))
        raise InvalidRequest(message, param=param, code="context_length_exceeded")


def _sizes(worker: WorkerHello) -> dict[str, int]:
    """What `shared.capacity` asks for."""
    return {"block_size": worker.block_size, "num_blocks": worker.num_blocks, "num_resident": worker.num_resident}


def hash_body(kind: str, raw: dict[str, Any]) -> str:
    """Equal for equal JSON on the same route, whatever its spacing and order of keys."""
    return hashlib.sha256(kind.encode() + orjson.dumps(raw, option=orjson.OPT_SORT_KEYS)).hexdigest()
