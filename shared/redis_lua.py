"""Lua functions that several scripts share; `shared/redis_scripts.py` puts them before a script's own body.

Design note.

* `live` is the compare-and-set of ending: SREM answers 1 to exactly one caller.
* A Redis at its memory limit refuses the first write of a script if it may need memory, and lets a script that has
  written go on. So a script that stores something new (submit, dispatch, commit) begins with such a write and is
  refused whole; one that only ends, frees or counts begins with a removal (`write_when_full`, SREM) and goes through.
* Messages made here must decode with `shared/wire.py`. cmsgpack has no bin type, so `bin` writes that header itself.
* Key names come from `shared/keys.py`. Keys are computed inside the scripts, not declared: one Redis is one cell,
  never a cluster. No script reads a clock. Redis 6.2 and up, Valkey too.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from shared import keys
from shared.ids import GatewayId, RequestId, WorkerId
from shared.limits import MINUTE_MS
from shared.messages import WIRE_VERSION

MAX_CHOICES = 65536
"""More than any request has; a record that claims more is not believed, or one script would loop for minutes."""
DEFAULT_TTL_MS = 600_000

NOT_LEADER = "LEADERLOST"
"""First word of the error that scripts answer to a token that does not lead."""

NAMES = f"""
local LIVE, LIVE_TOKENS, SUBMIT, REPORTS = '{keys.LIVE}', '{keys.LIVE_TOKENS}', '{keys.SUBMIT}', '{keys.REPORTS}'
local QUEUE, IN_FLIGHT, SPENT, MINUTE_MS = '{keys.QUEUE}', '{keys.IN_FLIGHT}', '{keys.SPENT}', {MINUTE_MS}
local WORKED = '{keys.WORKED}'
local LEADER, WORKERS, GATEWAYS, DEVICES = '{keys.LEADER}', '{keys.WORKERS}', '{keys.GATEWAYS}', '{keys.DEVICES}'
local REQ, LOG = '{keys.record(RequestId(""))}', '{keys.log(RequestId(""))}'
local INBOX, CHANNEL = '{keys.inbox(WorkerId(""))}', '{keys.token_channel(GatewayId(""))}'
local REPORTS_CAP, V = {keys.REPORTS_CAP}, {WIRE_VERSION}

local MAX_CHOICES, DEFAULT_TTL_MS = {MAX_CHOICES}, {DEFAULT_TTL_MS}

local function write_when_full()
  redis.call('HDEL', WORKERS, '')
end

local function whole(text, otherwise)
  local n = type(text) == 'string' and string.match(text, '^%d+$') and tonumber(text)
  return n and n < 2 ^ 53 and n or otherwise
end

local function num_choices(text)
  return math.min(whole(text, 0), MAX_CHOICES)
end

local function listeners_of(packed)
  local is_read, listeners = pcall(cmsgpack.unpack, packed)
  if not is_read or type(listeners) ~= 'table' then return {{}} end
  for _, l in ipairs(listeners) do
    if type(l) ~= 'table' or type(l[1]) ~= 'string' or type(l[2]) ~= 'string' then return {{}} end
  end
  return listeners
end

local function raise(key, field)
  local n = redis.pcall('HINCRBY', key, field, 1)
  if type(n) == 'number' then return n end
  redis.call('HSET', key, field, 1)
  return 1
end

local function add(key, field, n)
  local sum = redis.pcall('HINCRBY', key, field, n)
  if type(sum) == 'number' then return sum end
  if redis.call('TYPE', key).ok ~= 'hash' then redis.call('DEL', key) end
  redis.call('HSET', key, field, math.max(0, n))
  return math.max(0, n)
end

-- Counts a request into (1) or out of (-1) what is queued.
local function count_queued(key, sign)
  local r = redis.call('HMGET', key, 'choices', 'prompt_tokens')
  add(QUEUE, 'sequences', sign * num_choices(r[1]))
  add(QUEUE, 'tokens', sign * whole(r[2], 0))
end

local function reserve(tokens)
  if type(redis.pcall('INCRBY', LIVE_TOKENS, tokens)) ~= 'number' then redis.call('SET', LIVE_TOKENS, tokens) end
end

-- The compare-and-set of ending: true for one caller only. Counters of nothing are no counters.
local function leave_live(id, reserved, state, tenant)
  if redis.call('SREM', LIVE, id) == 0 then return false end
  if redis.call('SCARD', LIVE) == 0 then
    redis.call('DEL', LIVE_TOKENS, QUEUE, IN_FLIGHT)
    return true
  end
  reserve(-whole(reserved, 0))
  if state == 'queued' then count_queued(REQ .. id, -1) end
  if tenant and add(IN_FLIGHT, tenant, -1) <= 0 then redis.call('HDEL', IN_FLIGHT, tenant) end
  return true
end
"""

LEADER = f"""
local NOT_LEADER = redis.error_reply('{NOT_LEADER} the leader token is not this one')
local function leads(token)
  return redis.call('HGET', LEADER, 'token') == token
end
"""

RECORDS = """
local function is_known_worker(worker)
  return redis.call('HEXISTS', WORKERS, 'hello:' .. worker) == 1
end

local function queue_again(key)
  redis.call('HSET', key, 'state', 'queued', 'owner', '')
  count_queued(key, 1)
end

local function holds(key, worker, attempt)
  local r = redis.call('HMGET', key, 'state', 'owner', 'attempt')
  return r[1] == 'running' and r[2] == worker and tonumber(r[3]) == attempt
end

local function post(worker, id, message)
  message.v = V
  return redis.call('XADD', INBOX .. worker, '*', 'id', id, 'd', cmsgpack.pack(message))
end
"""

TELL = """
local function bytes_of(n, size)
  local text = ''
  for _ = 1, size do
    text = string.char(n % 256) .. text
    n = math.floor(n / 256)
  end
  return text
end

local function bin(data)
  local n = #data
  if n < 256 then return string.char(196, n) .. data end
  if n < 65536 then return string.char(197) .. bytes_of(n, 2) .. data end
  return string.char(198) .. bytes_of(n, 4) .. data
end

local function array(items)
  local n = #items
  local head = n < 16 and string.char(144 + n) or n < 65536 and string.char(220) .. bytes_of(n, 2)
      or string.char(221) .. bytes_of(n, 4)
  return head .. table.concat(items)
end

-- Puts a packed message into the box of each gateway that listens; `publish` sends the boxes, one publication each.
local function tell(boxes, listeners, message)
  local told = {}
  for _, listener in ipairs(listeners_of(listeners)) do
    local gateway = listener[1]
    if not told[gateway] then
      told[gateway] = true
      local box = boxes[gateway]
      if not box then
        box = {}
        boxes[gateway] = box
      end
      box[#box + 1] = message
    end
  end
end

local function publish(boxes)
  for gateway, messages in pairs(boxes) do
    redis.call('PUBLISH', CHANNEL .. gateway, array(messages))
  end
end
"""

TENANT = """
-- What a tenant has spent of its minute, in 1/MINUTE_MS of requests and tokens, by the cell's clock.
local function read_spent(tenant, limits)
  local clock = whole(redis.call('HGET', LEADER, 'clock_ms'), 0)
  local r = redis.call('HMGET', SPENT, 'requests:' .. tenant, 'tokens:' .. tenant, 'at:' .. tenant)
  local passed = math.min(MINUTE_MS, math.max(0, clock - whole(r[3], clock)))
  local spent = {}
  for i = 1, 2 do spent[i] = limits[i] and math.max(0, whole(r[i], 0) - passed * limits[i]) or 0 end
  return spent, clock
end

local function charge(tenant, spent, clock)
  redis.call('HSET', SPENT, 'requests:' .. tenant, string.format('%.0f', spent[1]), 'tokens:' .. tenant,
      string.format('%.0f', spent[2]), 'at:' .. tenant, clock)
end

local function left_of(limit, spent)
  return limit and math.max(0, limit - math.ceil(spent / MINUTE_MS)) or -1
end
"""

END = """
-- Gives back what a tenant spent in advance on tokens that there never were.
local function refund(tenant, unused)
  local spent = redis.pcall('HGET', SPENT, 'tokens:' .. tenant)
  if unused <= 0 or type(spent) ~= 'string' then return end
  spent = whole(spent, 0)
  redis.call('HSET', SPENT, 'tokens:' .. tenant, string.format('%.0f', math.max(0, spent - unused * MINUTE_MS)))
end

local function count_tokens(key, choices)
  local total = 0
  for c = 0, choices - 1 do
    local r = redis.call('HMGET', key, 'len:' .. c, 'stop:' .. c, 'fin:' .. c)
    if r[2] then
      total = total + whole(r[2], 0) + 1
    else
      total = total + math.max(0, whole(r[1], 0) - (r[3] and 1 or 0))
    end
  end
  return total
end

-- Ends a live request: true for one caller only. `abort`: tell the owner, who does not know it by itself.
local function end_request(boxes, id, reason, kind, message, abort)
  local key = REQ .. id
  local r = redis.pcall('HMGET', key, 'state', 'owner', 'listeners', 'idem', 'choices', 'reserved', 'ttl_ms',
      'prompt_tokens', 'tenant', 'charged', 'attempt')
  if not leave_live(id, r[6], r[1], r[9]) then return false end
  if not r[1] then
    redis.call('PEXPIRE', key, DEFAULT_TTL_MS)
    return false
  end
  local completion, ttl_ms = count_tokens(key, num_choices(r[5])), whole(r[7], DEFAULT_TTL_MS)
  redis.call('HSET', key, 'state', 'ended', 'reason', reason, 'completion_tokens', completion, 'error_kind', kind,
      'error_message', message)
  redis.call('PEXPIRE', key, ttl_ms)
  redis.call('PEXPIRE', LOG .. id, ttl_ms)
  if r[4] and r[4] ~= '' then redis.call('PEXPIRE', r[4], ttl_ms) end
  local ended = cmsgpack.pack({t = 'ended', v = V, request_id = id, reason = reason, prompt_tokens = whole(r[8], 0),
      completion_tokens = completion, error_kind = kind, error_message = message})
  if r[9] then refund(r[9], whole(r[10], 0) - (r[11] == '0' and 0 or whole(r[8], 0) + completion)) end
  tell(boxes, r[3], ended)
  redis.call('XADD', REPORTS, 'MAXLEN', '~', REPORTS_CAP, '*', 'id', id, 'd', ended)
  if abort and r[1] == 'running' and r[2] and is_known_worker(r[2]) then
    post(r[2], id, {t = 'abort', request_id = id})
  end
  return true
end
"""

WORK = """
-- Counts what a worker has computed for an attempt. It says the whole each time; what it had said before counted then.
local function count_work(id, attempt, prefill, decode)
  local key, field = REQ .. id, 'work:' .. attempt
  local r = redis.pcall('HMGET', key, 'tenant', 'attempt', field)
  if not r[1] or attempt > whole(r[2], 0) then return end
  local before = {string.match(r[3] or '', '^(%d+) (%d+)$')}
  local more = {prefill - whole(before[1], 0), decode - whole(before[2], 0)}
  if math.min(more[1], more[2]) < 0 or more[1] + more[2] == 0 then return end
  redis.call('HSET', key, field, string.format('%.0f %.0f', prefill, decode))
  for i, phase in ipairs({'prefill', 'decode'}) do
    if more[i] > 0 then
      add(key, phase .. '_us', more[i])
      add(WORKED, phase .. ':' .. r[1], more[i])
    end
  end
end
"""

LISTENERS = """
local function read_listeners(key)
  local r = redis.call('HMGET', key, 'state', 'listeners')
  if not r[1] or r[1] == 'ended' then return nil end
  return listeners_of(r[2])
end

-- Removes the listeners of a gateway (of one connection, if it is given); how many are left.
local function drop_listeners(key, listeners, gateway, connection)
  local left = {}
  for _, l in ipairs(listeners) do
    if l[1] ~= gateway or (connection and l[2] ~= connection) then left[#left + 1] = l end
  end
  if #left < #listeners then redis.call('HSET', key, 'listeners', cmsgpack.pack(left)) end
  return #left
end
"""

WORKER_GONE = """
local function is_named(worker, name)
  return string.match(worker, '^(.*):') == name
end

local function forget_worker(worker)
  redis.call('HDEL', WORKERS, 'hello:' .. worker, 'beat:' .. worker, 'steps:' .. worker, 'held:' .. worker,
      'suspect:' .. worker, 'card:' .. worker)
  redis.call('DEL', INBOX .. worker)
  local claims = redis.call('HGETALL', DEVICES)
  for i = 1, #claims, 2 do
    if claims[i + 1] == worker then redis.call('HDEL', DEVICES, claims[i]) end
  end
end

-- Forgets a worker that has died, queues again what it owned and counts its crash; the requests.
local function requeue_all(worker)
  local suspect = redis.call('HGET', WORKERS, 'suspect:' .. worker)
  local queued = {}
  for _, id in ipairs(redis.call('SMEMBERS', LIVE)) do
    local key = REQ .. id
    local r = redis.call('HMGET', key, 'state', 'owner', 'crashes')
    if r[1] == 'running' and r[2] == worker then
      queue_again(key)
      if suspect == id then
        redis.call('HINCRBY', key, 'crashes', 1)
      elseif not suspect and r[3] == '0' then
        redis.call('HSET', key, 'crashes', 1)
      end
      queued[#queued + 1] = id
    end
  end
  forget_worker(worker)
  return queued
end
"""


@dataclass(frozen=True, slots=True)
class Script:
    """Lua source and the SHA-1 that EVALSHA takes."""

    source: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest())


def script(*parts: str) -> Script:
    """One script: the names, then `parts` (functions of this module, last the body)."""
    return Script(NAMES + "".join(parts))
