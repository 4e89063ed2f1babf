"""Every message that crosses a process border, one class a hop, each with one writer and one reader.

| message | writer → reader | travels in |
|---|---|---|
| `SubmitRequest` | gateway → scheduler | `submit` stream, and the record (`summary`) |
| `RequestBody` | gateway → worker (and any gateway that resumes) | the record (`body`) |
| `RunRequest`, `PreemptRequest` | scheduler → worker | `inbox:{worker}` |
| `AbortRequest` | end script → worker | `inbox:{worker}` |
| `WorkerHello` | worker → scheduler, gateways | `workers` hash |
| `WorkerReport` | worker → scheduler, gateways | `reports` stream |
| `RequestEnded` | end script → scheduler (`reports`), gateways (`tok:{gateway}`) | |
| `TokenChunk` | commit script → gateways | `tok:{gateway}` |
| `AdapterCard` | worker, gateway → gateways | `adapters` hash |

Frozen, slotted dataclasses of plain types; `shared/wire.py` turns them to bytes and back. New fields come only with
defaults. Token ids, lengths and block counts are non-negative ints; times are named with their unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.capacity import resident_tokens
from shared.ids import RequestId, WorkerId

WIRE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen; resolved by the gateway, so nothing here is optional by absence.

    `seed` is always set (the gateway draws one). `max_tokens` fits the context. `stop_token_ids` already holds the
    model's end tokens unless the request said `ignore_eos`; a sequence that draws one of them ends with "stop", and
    they are banned for the first `min_tokens` tokens. `top_k` 0 means all. `num_logprobs` None means not wanted, 0 the
    chosen token's only.
    """

    seed: int
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest:
    """What the scheduler needs to know of a request; a wake-up in the stream, and the record's `summary`.

    Choice `c` is prompt `c // n`, sample `c % n`. `timeout_s` is the request deadline, counted by the leader's
    monotonic clock from when it first saw the request. Lower `priority` runs first. `user` subdivides the tenant.
    `prefixes` are the packed names of each prompt's first blocks (`shared/prefix.py`), for placement; may be empty.
    """

    request_id: RequestId
    tenant: str
    model: str
    fingerprint: str
    prompt_lens: tuple[int, ...]
    n: int
    max_tokens: int
    timeout_s: float = 600.0
    priority: int = 0
    user: str = ""
    prefixes: tuple[bytes, ...] = ()

    @property
    def num_choices(self) -> int:
        return len(self.prompt_lens) * self.n

    @property
    def num_reserved_tokens(self) -> int:
        """The most tokens it may come to hold: each prompt once, and `max_tokens` for each choice."""
        return sum(self.prompt_lens) + self.num_choices * self.max_tokens

    def prompt_len(self, choice: int) -> int:
        """Prompt tokens of `choice`."""
        return self.prompt_lens[choice // self.n]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBody:
    """What a worker needs to compute a request and any gateway needs to render it again from its log.

    `kind` is "completion", "chat" or "embedding" (a choice is a prompt, and no token is drawn). `created` is unix
    seconds, shown to the client only. `cache_salt` sets apart whose cached prefixes the request may find, within its
    tenant. `response_format`-like features will be new fields with defaults.

    `num_returned` (`best_of`): of each prompt's `n` choices the client gets so many, those with the highest mean log
    probability a token; None: all. `hides_logprobs`: the log holds logprobs for that comparison only.
    `include_cost`: usage says what the request cost, so its worker writes that with each commit. `card` names the
    model card by which its log is rendered (`shared/model_card.py`); "": by the name of the model. `adapter`: hash of
    the content of the adapter that it runs with, read from `adapter_path` by workers that do not hold it; "": none.
    `returns_token_ids`: the client gets prompt and output as token ids, too. `names_tokens_by_id`: logprobs name tokens
    by their ids. `encoding_format` of embeddings: "float" or "base64".
    """

    kind: str
    model: str
    created: int
    prompts: tuple[tuple[int, ...], ...]
    n: int
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    has_idempotency_key: bool = False
    cache_salt: str = ""
    num_returned: int | None = None
    hides_logprobs: bool = False
    include_cost: bool = False
    card: str = ""
    returns_token_ids: bool = False
    names_tokens_by_id: bool = False
    encoding_format: str = "float"
    adapter: str = ""
    adapter_path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Run the named unfinished choices as attempt `attempt`; the worker reads body and log from the record.

    (`priority`, `rank`) is the scheduler's standing order: a worker that runs out of blocks evicts the highest first
    (rank grows with arrival, so the youngest of the least urgent). `crashes` ≥ 1: step it alone until it logs a token.
    """

    request_id: RequestId
    attempt: int
    choices: tuple[int, ...]
    rank: int
    crashes: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptRequest:
    """Take attempt `attempt` out of the batch; void if the worker evicted anything after report `report_seq`.

    Without `keeps` the worker gives it back, to be queued and computed again wherever. With it the request stays and
    waits in its order; its blocks go to host memory if there is room there, else they are computed again.
    """

    request_id: RequestId
    attempt: int
    report_seq: int
    keeps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """The request has ended (cancel, stop string, deadline): drop it now. A hint; commit and beat answer the same."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """Who a worker is: constant for its incarnation. `num_blocks` are those usable by sequences. With a prefix cache
    requests that name equal prefixes share their blocks. Each sequence gets blocks for `reserved_tokens` at least.
    `num_swap_blocks` fit into its host memory; `preemption_mode` is one of `shared/preemption.py`. A query sees
    `window` tokens at most (0: all), a step computes `step_tokens` at most: what a sequence holds, by
    `shared/capacity.py`. `settings`: further flags and their values, for people and `/metrics`. `names`: all under
    which the model is served, `model` the first of them. `card` names the model's card, "": it has none. `max_loras`:
    adapters that a step may have, 0: none."""

    worker_id: WorkerId
    model: str
    fingerprint: str
    dtype: str
    device: str
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    pid: int
    host: str
    has_prefix_cache: bool = False
    reserved_tokens: int = 0
    num_swap_blocks: int = 0
    preemption_mode: str = "auto"
    settings: tuple[tuple[str, str], ...] = ()
    window: int = 0
    step_tokens: int = 0
    names: tuple[str, ...] = ()
    card: str = ""
    max_loras: int = 0

    @property
    def num_resident(self) -> int:
        """Most tokens of a sequence that are in blocks at once; 0: all."""
        return resident_tokens(self.window, self.step_tokens)

    @property
    def served_names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return self.names or (self.model,)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRequest:
    """One request that a worker holds: blocks in use, tokens known (prompt and output) over its choices.

    `num_shared_blocks` of the blocks were there before it was admitted and others use them, too: they stay when it
    leaves. `num_running` of its sequences have blocks and are in the batch, `num_waiting` wait inside the worker, with
    `num_swapped_blocks` in host memory.
    """

    request_id: RequestId
    attempt: int
    num_blocks: int
    num_tokens: int
    num_running: int
    num_waiting: int
    num_shared_blocks: int = 0
    num_swapped_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """A worker's state after a change (`gpu_worker/pulse.py`). Counters rise for the life of the incarnation.

    `last_inbox_id` is the newest inbox entry applied: free blocks for planning = `free_blocks` − what was dispatched
    after it. `num_evictions` counts sequences the worker had to evict by itself; `num_preemptions` those plus the ones
    it was told to. `num_prefix_queries` counts tokens of sequences that were admitted, `num_prefix_hits` those of them
    that were found in the prefix cache. `prefixes_here` are packed names that it holds, new ones and in turns all
    others, `prefixes_gone` those that it has forgotten since the report before. `num_live_tokens` lie in the blocks in
    use, each of `block_size` tokens; `most_blocks_used` have been in use, and
    `most_running` sequences have run, at the same time. `num_padded_rows` were computed for sequences that had ended.
    `free_swap_blocks` of the host memory are free. `block_copy_s` and `token_s` are what copying a block one way and
    computing a token of a prompt have cost lately, in seconds; 0: not known yet. `num_swapped_out` and `num_swapped_in`
    count blocks copied to host memory and back, `num_swap_preemptions` those of the preemptions that did it.
    """

    worker_id: WorkerId
    seq: int
    last_inbox_id: str
    free_blocks: int
    num_blocks: int
    num_steps: int
    held: tuple[HeldRequest, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    num_evictions: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_live_tokens: int = 0
    most_blocks_used: int = 0
    most_running: int = 0
    num_padded_rows: int = 0
    block_size: int = 0
    free_swap_blocks: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_swap_preemptions: int = 0
    block_copy_s: float = 0.0
    token_s: float = 0.0
    prefixes_here: bytes = b""
    prefixes_gone: bytes = b""
    is_draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnded:
    """A request has ended, told once by the script that won. `reason`: finished, cancelled, rejected, failed,
    deadline. Usage counts tokens; `error_*` are set for rejected, failed and deadline."""

    request_id: RequestId
    reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error_kind: str = ""
    error_message: str = ""


@dataclass(slots=True, kw_only=True)
class TokenChunk:
    """Bytes that the commit script appended to a request's log at byte `offset` (whole entries, `shared/log.py`).

    Not frozen, since one is made for each token: a frozen one takes three times as long (1.2 µs). Nobody changes it.
    """

    request_id: RequestId
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCard:
    """An adapter that requests may name. `model`: a name of the model that it changes. `path`: its folder, for workers
    that do not hold `content`, the hash of its files (`shared/adapters.py`)."""

    name: str
    model: str
    path: str
    content: str


Message = (
    SubmitRequest
    | RequestBody
    | RunRequest
    | PreemptRequest
    | AbortRequest
    | WorkerHello
    | WorkerReport
    | RequestEnded
    | TokenChunk
    | AdapterCard
)

TAGS: dict[str, type] = {
    "submit": SubmitRequest,
    "body": RequestBody,
    "run": RunRequest,
    "preempt": PreemptRequest,
    "abort": AbortRequest,
    "hello": WorkerHello,
    "report": WorkerReport,
    "ended": RequestEnded,
    "chunk": TokenChunk,
    "adapter": AdapterCard,
}
