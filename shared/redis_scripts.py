"""The Lua scripts: one per step of the protocol, each atomic, each safe to run again when its reply was lost.

A script is the shared functions of `shared/redis_lua.py` it needs, and its own body. Arguments and replies are
documented where `shared/redis_bus.py` calls them; `shared/bus.py` says what each step means.
"""

from __future__ import annotations

from shared import keys
from shared import redis_lua as lua
from shared.redis_lua import script

RECORD_REPLY_FIELDS = (
    "summary", "state", "order", "attempt", "owner", "listeners", "orphan_ttl_s", "preemptions", "crashes", "choices",
    "reason", "prompt_tokens", "completion_tokens", "error_kind", "error_message", "prefill_us", "decode_us",
)  # fmt: skip
"""What `LOAD_RECORDS` answers first; then length, stop index and finish of each choice. What has no record, or one that
is none, is not live."""


SUBMIT = script(
    lua.TENANT,
    """
local id, summary, body, listeners, idem, body_hash = unpack(ARGV, 1, 6)
local choices, prompt_tokens, reserved, orphan_ttl_s, ttl_ms = unpack(ARGV, 7, 11)
local max_requests, max_tokens, memory_high = tonumber(ARGV[12]), tonumber(ARGV[13]), ARGV[14]
local max_queued, max_queued_tokens = tonumber(ARGV[15]), tonumber(ARGV[16])
local tenant, limits, max_in_flight = ARGV[17], {tonumber(ARGV[18]), tonumber(ARGV[19])}, tonumber(ARGV[20])
if redis.call('EXISTS', REQ .. id) == 1 then return {'exists', id} end
local known = idem ~= '' and redis.call('GET', idem)
if known then
  local first, hash = string.match(known, '^(%S+) (.*)$')
  if redis.call('EXISTS', REQ .. first) == 1 then
    return {hash == body_hash and 'exists' or 'conflict', first}
  end
end

local q = redis.call('HMGET', QUEUE, 'sequences', 'tokens')
local queued, queued_tokens = whole(q[1], 0), whole(q[2], 0)
local spent, clock = read_spent(tenant, limits)
local cost = {MINUTE_MS, tonumber(reserved) * MINUTE_MS}
local function refuse(answer, reason, detail, wait_ms)
  return {answer, id, detail, reason, wait_ms or 0, queued, queued_tokens, left_of(limits[1], spent[1]),
      left_of(limits[2], spent[2])}
end
if memory_high ~= '' then return refuse('full', 'memory', memory_high) end
if max_in_flight and whole(redis.call('HGET', IN_FLIGHT, tenant), 0) >= max_in_flight then
  return refuse('limited', 'tenant_in_flight', 'requests in flight: at most ' .. max_in_flight)
end
for i, what in ipairs({'requests', 'tokens'}) do
  local over = limits[i] and spent[i] + cost[i] - limits[i] * MINUTE_MS or 0
  if over > 0 then
    local detail = what .. ' per minute: at most ' .. ARGV[17 + i]
    return refuse('limited', 'tenant_' .. what, detail, math.ceil(over / limits[i]))
  end
end
if redis.call('SCARD', LIVE) >= max_requests then
  return refuse('full', 'live_requests', 'live requests: at most ' .. max_requests)
end
if whole(redis.call('GET', LIVE_TOKENS), 0) + tonumber(reserved) > max_tokens then
  return refuse('full', 'live_tokens', 'tokens of live requests: at most ' .. max_tokens)
end
if max_queued and queued > 0 and queued + choices > max_queued then
  return refuse('full', 'queued_requests', 'queued requests: at most ' .. max_queued)
end
if max_queued_tokens and queued > 0 and queued_tokens + prompt_tokens > max_queued_tokens then
  return refuse('full', 'queued_tokens', 'prompt tokens of queued requests: at most ' .. max_queued_tokens)
end

local order = redis.call('XADD', SUBMIT, '*', 'id', id, 'd', summary)
redis.call('HSET', REQ .. id, 'summary', summary, 'body', body, 'state', 'queued', 'order', order, 'attempt', 0,
    'owner', '', 'listeners', listeners, 'orphan_ttl_s', orphan_ttl_s, 'choices', choices, 'open', choices, 'reserved',
    reserved, 'ttl_ms', ttl_ms, 'preemptions', 0, 'crashes', 0, 'idem', idem, 'prompt_tokens', prompt_tokens, 'tenant',
    tenant, 'charged', limits[2] and reserved or 0)
redis.call('SADD', LIVE, id)
reserve(reserved)
count_queued(REQ .. id, 1)
add(IN_FLIGHT, tenant, 1)
for i = 1, 2 do spent[i] = limits[i] and spent[i] + cost[i] or 0 end
if limits[1] or limits[2] then charge(tenant, spent, clock) end
if idem ~= '' then redis.call('SET', idem, id .. ' ' .. body_hash) end
return {'new', id, '', '', 0, 0, 0, left_of(limits[1], spent[1]), left_of(limits[2], spent[2])}
""",
)

LOAD_RECORDS = script(
    f"local FIELDS = {{{', '.join(map(repr, RECORD_REPLY_FIELDS))}}}",
    """
local rows = {}
for i, id in ipairs(ARGV) do
  local row = redis.pcall('HMGET', REQ .. id, unpack(FIELDS))
  if not row[1] then
    leave_live(id, '0', '')
    redis.call('DEL', REQ .. id, LOG .. id)
  end
  for c = 0, row[1] and num_choices(row[10]) - 1 or -1 do
    local r, n = redis.call('HMGET', REQ .. id, 'len:' .. c, 'stop:' .. c, 'fin:' .. c), #FIELDS + 3 * c
    row[n + 1], row[n + 2], row[n + 3] = r[1], r[2], r[3]
  end
  rows[i] = row[1] and row or false
end
return rows
""",
)

ATTACH = script(
    lua.LISTENERS,
    """
local key, gateway, connection = REQ .. ARGV[1], ARGV[2], ARGV[3]
local listeners = read_listeners(key)
if not listeners then return 0 end
for _, l in ipairs(listeners) do
  if l[1] == gateway and l[2] == connection then return 1 end
end
listeners[#listeners + 1] = {gateway, connection}
redis.call('HSET', key, 'listeners', cmsgpack.pack(listeners))
return 1
""",
)

DETACH = script(
    lua.LISTENERS,
    """
local key = REQ .. ARGV[1]
local listeners = read_listeners(key)
if not listeners then return 0 end
write_when_full()
return drop_listeners(key, listeners, ARGV[2], ARGV[3])
""",
)

END = script(
    lua.LEADER,
    lua.RECORDS,
    lua.TELL,
    lua.END,
    """
if ARGV[5] ~= '' and not leads(ARGV[5]) then return NOT_LEADER end
local boxes = {}
local won = end_request(boxes, ARGV[1], ARGV[2], ARGV[3], ARGV[4], true)
publish(boxes)
return won and 1 or 0
""",
)

STOP_CHOICE = script(
    lua.RECORDS,
    lua.TELL,
    lua.END,
    """
local id, choice, index = ARGV[1], ARGV[2], tonumber(ARGV[3])
local key = REQ .. id
local r = redis.call('HMGET', key, 'state', 'len:' .. choice, 'stop:' .. choice, 'fin:' .. choice)
if not r[1] or r[1] == 'ended' or r[3] then return 0 end
if index >= (tonumber(r[2]) or 0) - (r[4] and 1 or 0) then return 0 end
write_when_full()
redis.call('HSET', key, 'stop:' .. choice, index)
if not r[4] and redis.call('HINCRBY', key, 'open', -1) == 0 then
  local boxes = {}
  end_request(boxes, id, 'finished', '', '', true)
  publish(boxes)
end
return 1
""",
)

TAKE_LEAD = script(
    """
local token, seen_token, seen_beat = ARGV[1], ARGV[2], ARGV[3]
local r = redis.call('HMGET', LEADER, 'token', 'beat')
if r[1] == token then return 1 end
if (r[1] or '') ~= seen_token or whole(r[2], 0) ~= tonumber(seen_beat) then return 0 end
write_when_full()
redis.call('HSET', LEADER, 'token', token)
redis.call('HDEL', LEADER, 'at_ms')
raise(LEADER, 'beat')
return 1
"""
)

RAISE_LEAD = script(
    lua.LEADER,
    """
if not leads(ARGV[1]) then return NOT_LEADER end
write_when_full()
if ARGV[2] ~= '' then
  local r, now = redis.call('HMGET', LEADER, 'at_ms', 'clock_ms'), tonumber(ARGV[2])
  local passed = math.max(0, now - whole(r[1], now))
  redis.call('HSET', LEADER, 'at_ms', ARGV[2], 'clock_ms', string.format('%.0f', whole(r[2], 0) + passed))
end
return raise(LEADER, 'beat')
""",
)

YIELD_LEAD = script(
    lua.LEADER,
    """
write_when_full()
if leads(ARGV[1]) then redis.call('HSET', LEADER, 'token', '') end
return 1
""",
)

ACK_SUBMITS = script(
    """
local group = ARGV[1]
for i = 2, #ARGV do
  redis.call('XACK', SUBMIT, group, ARGV[i])
  redis.call('XDEL', SUBMIT, ARGV[i])
end
return 1
"""
)

DISPATCH = script(
    lua.LEADER,
    lua.RECORDS,
    """
if not leads(ARGV[1]) then return NOT_LEADER end
local id, worker, rank, priority = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local key = REQ .. id
local r = redis.call('HMGET', key, 'state', 'attempt', 'crashes', 'choices')
if not r[1] or r[1] == 'ended' then return {'ended'} end
if r[1] ~= 'queued' then return {'not_queued'} end
if not is_known_worker(worker) then return {'no_worker'} end
local open = {}
for c = 0, tonumber(r[4]) - 1 do
  local ends = redis.call('HMGET', key, 'stop:' .. c, 'fin:' .. c)
  if not ends[1] and not ends[2] then open[#open + 1] = c end
end
local attempt = tonumber(r[2]) + 1
redis.call('HSET', key, 'state', 'running', 'owner', worker, 'attempt', attempt)
count_queued(key, -1)
local entry = post(worker, id, {t = 'run', request_id = id, attempt = attempt, choices = open, rank = rank,
    crashes = tonumber(r[3]), priority = priority})
return {'ok', entry, attempt}
""",
)

PREEMPT = script(
    lua.LEADER,
    lua.RECORDS,
    """
if not leads(ARGV[1]) then return NOT_LEADER end
if not is_known_worker(ARGV[2]) then return '0-0' end
return redis.call('XADD', INBOX .. ARGV[2], '*', 'id', ARGV[3], 'd', ARGV[4])
""",
)

REQUEUE = script(
    lua.LEADER,
    lua.RECORDS,
    lua.WORKER_GONE,
    """
if not leads(ARGV[1]) then return NOT_LEADER end
write_when_full()
return requeue_all(ARGV[2])
""",
)

REQUEUE_ONE = script(
    lua.LEADER,
    lua.RECORDS,
    """
if not leads(ARGV[1]) then return NOT_LEADER end
local key = REQ .. ARGV[2]
if not holds(key, ARGV[3], tonumber(ARGV[4])) then return 0 end
write_when_full()
queue_again(key)
return 1
""",
)

REMOVE_GATEWAY = script(
    lua.LEADER,
    lua.LISTENERS,
    """
if not leads(ARGV[1]) then return NOT_LEADER end
write_when_full()
local orphans = {}
for _, id in ipairs(redis.call('SMEMBERS', LIVE)) do
  local listeners = read_listeners(REQ .. id)
  if listeners and drop_listeners(REQ .. id, listeners, ARGV[2]) == 0 then orphans[#orphans + 1] = id end
end
redis.call('HDEL', GATEWAYS, 'beat:' .. ARGV[2])
return orphans
""",
)

WANT_WORKERS = script(
    lua.LEADER,
    f"local WISH = '{keys.WISH}'",
    """
if not leads(ARGV[1]) then return NOT_LEADER end
redis.call('DEL', WISH)
redis.call('HSET', WISH, 'num_workers', ARGV[2], 'leaving', ARGV[3])
return 1
""",
)

HELLO = script(
    lua.RECORDS,
    lua.WORKER_GONE,
    """
local worker, name, hello, card = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
redis.call('HSET', WORKERS, 'hello:' .. worker, hello)
if card ~= '' then redis.call('HSET', WORKERS, 'card:' .. worker, card) end
redis.call('HSETNX', WORKERS, 'beat:' .. worker, 0)
for _, field in ipairs(redis.call('HKEYS', WORKERS)) do
  local other = string.match(field, '^hello:(.*)$')
  if other and other ~= worker and is_named(other, name) then requeue_all(other) end
end
return 1
""",
)

BYE = script(
    lua.WORKER_GONE,
    """
forget_worker(ARGV[1])
return 1
""",
)

COMMIT = script(
    lua.RECORDS,
    lua.TELL,
    lua.END,
    lua.WORK,
    """
local OK, GAP, STOP, LOST = 0, 1, 2, 3
local CHUNK = string.char(133) .. cmsgpack.pack('t', 'chunk', 'v', V, 'request_id')
local worker, boxes = ARGV[1], {}

local function commit(id, attempt, choice, start, entries, finish)
  local key, len = REQ .. id, 'len:' .. choice
  local r = redis.call('HMGET', key, 'state', 'owner', 'attempt', len, 'stop:' .. choice, 'fin:' .. choice, 'crashes',
      'listeners')
  local state, length, last = r[1], tonumber(r[4]) or 0, start + #entries
  if r[2] ~= worker or tonumber(r[3]) ~= attempt then return state == 'ended' and STOP or LOST, length end
  if r[6] and last <= length then return OK, length end
  if state == 'ended' or r[5] or r[6] then return STOP, length end
  if start > length then return GAP, length end
  if last <= length then return OK, length end

  local data = table.concat(entries, '', length - start + 1)
  local offset = redis.call('APPEND', LOG .. id, data) - #data
  tell(boxes, r[8], CHUNK .. cmsgpack.pack(id, 'offset', offset, 'data') .. bin(data))
  local is_finished = finish ~= ''
  if r[7] ~= '0' and last - length > (is_finished and 1 or 0) then redis.call('HSET', key, 'crashes', 0) end
  if not is_finished then
    redis.call('HSET', key, len, last)
    return OK, last
  end
  redis.call('HSET', key, len, last, 'fin:' .. choice, finish)
  if redis.call('HINCRBY', key, 'open', -1) == 0 then end_request(boxes, id, 'finished', '', '', false) end
  return OK, last
end

local items, answers = cmsgpack.unpack(ARGV[2]), {}
if ARGV[3] then
  if #items == 0 then write_when_full() end
  for _, work in ipairs(cmsgpack.unpack(ARGV[3])) do count_work(unpack(work, 1, 4)) end
end
for _, item in ipairs(items) do
  local n = #answers
  answers[n + 1], answers[n + 2] = commit(unpack(item, 1, 6))
end
publish(boxes)
return answers
""",
)
"""Items are packed as they are, [id, attempt, choice, start, entries, finish], and so is work, if there is any,
[id, attempt, prefill, decode]; answers are code, length, code, ..."""

BEAT = script(
    lua.RECORDS,
    """
local OK, STOP, LOST = 0, 2, 3
local worker, steps, held = ARGV[1], ARGV[2], cmsgpack.unpack(ARGV[3])
local is_known, answers = is_known_worker(worker), {}
if is_known then
  write_when_full()
  raise(WORKERS, 'beat:' .. worker)
  redis.call('HSET', WORKERS, 'steps:' .. worker, steps, 'held:' .. worker, #held)
end
for i, item in ipairs(held) do
  local r = redis.call('HMGET', REQ .. item[1], 'state', 'owner', 'attempt')
  if not is_known then
    answers[i] = LOST
  elseif r[1] == 'ended' then
    answers[i] = STOP
  else
    answers[i] = r[1] == 'running' and r[2] == worker and tonumber(r[3]) == item[2] and OK or LOST
  end
end
return answers
""",
)

RELEASE = script(
    lua.RECORDS,
    """
local key = REQ .. ARGV[2]
if not holds(key, ARGV[1], tonumber(ARGV[3])) then return 0 end
write_when_full()
queue_again(key)
redis.call('HINCRBY', key, 'preemptions', ARGV[4])
return 1
""",
)

MARK_SUSPECT = script(
    lua.RECORDS,
    """
if not is_known_worker(ARGV[1]) then return 0 end
if ARGV[2] == '' then return redis.call('HDEL', WORKERS, 'suspect:' .. ARGV[1]) end
return redis.call('HSET', WORKERS, 'suspect:' .. ARGV[1], ARGV[2])
""",
)

CLAIM_DEVICE = script(
    lua.RECORDS,
    lua.WORKER_GONE,
    """
local worker, name = ARGV[1], ARGV[2]
local free
for i = 3, #ARGV do
  local holder = redis.call('HGET', DEVICES, ARGV[i])
  if holder == worker then return ARGV[i] end
  local is_free = not holder or (is_named(holder, name) and not is_known_worker(holder))
  free = free or (is_free and ARGV[i])
end
if free then redis.call('HSET', DEVICES, free, worker) end
return free
""",
)
"""`name` is the worker's id without its random part: a claim by an earlier start of the same name that never came to
say hello is free. Other claims go with their worker (requeue, bye)."""

USE_CARD = script(
    f"local CARDS, CARD, SPARE_CARDS = '{keys.CARDS}', '{keys.card('')}', {keys.SPARE_CARDS}",
    """
local card, data = ARGV[1], ARGV[2]
write_when_full()
if data then redis.call('SET', CARD .. card, data, 'NX') end
if redis.call('EXISTS', CARD .. card) == 0 then return 0 end
local latest = redis.call('ZREVRANGE', CARDS, 0, 0, 'WITHSCORES')
redis.call('ZADD', CARDS, (tonumber(latest[2]) or 0) + 1, card)

local is_named, num_spare = {}, 0
local fields = redis.call('HGETALL', WORKERS)
for i = 1, #fields, 2 do
  if string.sub(fields[i], 1, 5) == 'card:' then is_named[fields[i + 1]] = true end
end
for _, other in ipairs(redis.call('ZREVRANGE', CARDS, 0, -1)) do
  if not is_named[other] then num_spare = num_spare + 1 end
  if not is_named[other] and num_spare > SPARE_CARDS then
    redis.call('DEL', CARD .. other)
    redis.call('ZREM', CARDS, other)
  end
end
return 1
""",
)
"""With a second argument, the card's data, it is stored first unless it is there."""

PREFIX_KEY = script(
    f"local PREFIX_KEY = '{keys.PREFIX_KEY}'",
    """
write_when_full()
redis.call('SET', PREFIX_KEY, ARGV[1], 'NX')
return redis.call('GET', PREFIX_KEY)
""",
)

GATEWAY_BEAT = script(
    """
write_when_full()
return raise(GATEWAYS, 'beat:' .. ARGV[1])
"""
)
