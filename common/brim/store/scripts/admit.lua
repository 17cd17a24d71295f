-- Admits one message from the broker's list into a record, or refuses it with a reason (DESIGN, "Intake").
-- Acts only if its own LREM of the envelope succeeded, so a message is in the list or in a record, never
-- between, and never admitted twice, with any number of intake replicas.
--
-- KEYS  1 broker list  2 record  3 story  4 counts  5 tasks  6 lane  7 lanes  8 changed  9 wake
--       10 scheduled  11 expiring  12 seq  13 finished  14 outbox  15 awaited  16 lane that the record waits in
--       17 revoked
-- ARGV  1 raw envelope  2 task id  3 task name  4 nesting  5 retries  6 lane  7 priority (0 first)
--       8 eta ms or ''  9 expires ms or ''  10 head  11 tail  12 demand JSON  13 context MiB
--       14 "1" if the envelope carries brim's attempt header with this very rank
--       15 refusal reason JSON or ''  16 why it must wait before it can be placed, JSON or ''
--       17 estimate's explanation, JSON  18 lane that the record waits in, '' if none
--       19 reason JSON of a task that was revoked before it came
--       20 what a batched task is batched by, JSON, else ''  21 its size, else ''
-- Returns  "gone" (another replica took it) | "admitted" | "scheduled" | "refused" | "revoked" (cancelled at
--          once) | "held" (a run of this id still lives; kept as its next) | "redelivery"
--          | "orphan" (an attempt's message without record)
--          | "closed" (brim has given this id its last answer) | "moved" (a run of this id that waits in
--          another lane gives way: ask again; nothing was done)

local record, id, now = KEYS[2], ARGV[2], now_ms()
local nesting, retries = tonumber(ARGV[4]), tonumber(ARGV[5])
local known = redis.call('HMGET', record, 'state', 'nesting', 'retries', 'lane', 'cancel', 'next_nesting', 'next_retries')
local state = known[1]
local newer = state and later(nesting, retries, tonumber(known[2]), tonumber(known[3]))
if newer and state == 'waiting' and known[4] ~= ARGV[18] then return 'moved' end
if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 0 then return 'gone' end
if state then
  if not newer then return 'redelivery' end
  if LIVE[state] then
    if known[6] and not later(nesting, retries, tonumber(known[6]), tonumber(known[7])) then return 'redelivery' end
    redis.call('HSET', record, 'next', ARGV[1], 'next_list', KEYS[1], 'next_nesting', ARGV[4], 'next_retries', ARGV[5])
    tell(KEYS[3], now, 'held', ',"retries":' .. ARGV[5] .. ',"nesting":' .. ARGV[4])
    return 'held'
  end
  if ANSWERED[state] or known[5] then
    tell(KEYS[3], now, 'dropped', ',"retries":' .. ARGV[5] .. ',"nesting":' .. ARGV[4])
    return 'closed'
  end
  redis.call('ZREM', KEYS[10], id)
  redis.call('ZREM', KEYS[11], id)
  redis.call('ZREM', KEYS[13], id)
  redis.call('ZREM', KEYS[15], id)
  if state == 'waiting' then
    redis.call('ZREM', KEYS[16], id)
    changed(KEYS[8], KEYS[9], 'l:' .. ARGV[18])
  end
elseif ARGV[14] == '1' then
  return 'orphan'
end

-- Ten-microsecond ticks since 2025, strictly increasing: the order of admission, and its time.
local time = redis.call('TIME')
local tick = (time[1] - 1735689600) * 100000 + math.floor(time[2] / 10)
tick = math.max(tick, tonumber(redis.call('GET', KEYS[12]) or '0') + 1)
redis.call('SET', KEYS[12], integer(tick))
local order = overflow_order(ARGV[7], tick, ARGV[20])

redis.call('HDEL', record, 'attempt', 'devices', 'executor', 'node', 'boot', 'proc', 'reason', 'placed_ms',
  'claimed_ms', 'started_ms', 'finished_ms', 'finisher', 'finisher_ms', 'ended_ms', 'batch', 'size')
redis.call('HSET', record, 'task', ARGV[3], 'nesting', ARGV[4], 'retries', ARGV[5], 'lane', ARGV[6],
  'priority', ARGV[7], 'order', order, 'eta_ms', ARGV[8], 'expires_ms', ARGV[9], 'head', ARGV[10],
  'tail', ARGV[11], 'demand', ARGV[12], 'context_mib', ARGV[13], 'admitted_ms', integer(now), 'losses', '0')
if ARGV[20] ~= '' then redis.call('HSET', record, 'batch', ARGV[20], 'size', ARGV[21]) end
redis.call('HINCRBY', record, 'run', 1)
redis.call('ZADD', KEYS[5], 'NX', integer(tick), id)

if ARGV[15] ~= '' then
  move(record, KEYS[4], state, 'dead')
  redis.call('HSET', record, 'reason', ARGV[15])
  tell(KEYS[3], now, 'refused', because(ARGV[15]))
  close(record, KEYS[13], KEYS[11], id, now, true)
  owe_answer(KEYS[14], record, id, 'dead', ARGV[15])
  return 'refused'
end

redis.call('HSET', record, 'estimate', ARGV[17])
tell(KEYS[3], now, 'admitted', ',"estimate":' .. ARGV[17] .. ',"run":' .. redis.call('HGET', record, 'run'))
if redis.call('ZSCORE', KEYS[17], id) then
  move(record, KEYS[4], state, 'cancelled')
  redis.call('HSET', record, 'reason', ARGV[19])
  tell(KEYS[3], now, 'cancelled', because(ARGV[19]))
  close(record, KEYS[13], KEYS[11], id, now, true)
  owe_answer(KEYS[14], record, id, 'cancelled', ARGV[19])
  return 'revoked'
end
if ARGV[9] ~= '' then redis.call('ZADD', KEYS[11], ARGV[9], id) end
if ARGV[8] ~= '' and tonumber(ARGV[8]) > now then
  move(record, KEYS[4], state, 'scheduled')
  redis.call('ZADD', KEYS[10], ARGV[8], id)
  return 'scheduled'
end
move(record, KEYS[4], state, 'waiting')
if ARGV[16] ~= '' then redis.call('HSET', record, 'reason', ARGV[16]) end
enqueue(record, KEYS[6], KEYS[7], KEYS[8], KEYS[9], id)
return 'admitted'
