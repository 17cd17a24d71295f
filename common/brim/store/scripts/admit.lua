-- Admits one message from the broker's list into a record, or refuses it with a reason (DESIGN, "Intake").
-- Acts only if its own LREM of the envelope succeeded, so a message is in the list or in a record, never
-- between, and never admitted twice, with any number of intake replicas.
--
-- KEYS  1 broker list  2 record  3 story  4 counts  5 tasks  6 lane  7 lanes  8 changed  9 wake
--       10 scheduled  11 expiring  12 seq  13 finished  14 outbox
-- ARGV  1 raw envelope  2 task id  3 task name  4 nesting  5 retries  6 lane  7 priority (0 first)
--       8 eta ms or ''  9 expires ms or ''  10 head  11 tail  12 demand JSON  13 context MiB
--       14 "1" if the envelope carries brim's attempt header with this very rank
--       15 refusal reason JSON or ''  16 why it must wait before it can be placed, JSON or ''  17 estimate's explanation, JSON
-- Returns  "gone" (another replica took it) | "admitted" | "scheduled" | "refused" | "held" (a run of this
--          id still lives; kept as its next) | "redelivery" | "orphan" (an attempt's message without record)

if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 0 then return 'gone' end
local record, id, now = KEYS[2], ARGV[2], now_ms()
local known = redis.call('HMGET', record, 'state', 'nesting', 'retries')
local state = known[1]
if state then
  local nesting, retries = tonumber(ARGV[4]), tonumber(ARGV[5])
  local had_nesting, had_retries = tonumber(known[2]), tonumber(known[3])
  if nesting < had_nesting or (nesting == had_nesting and retries <= had_retries) then return 'redelivery' end
  if LIVE[state] then
    redis.call('HSET', record, 'next', ARGV[1], 'next_list', KEYS[1])
    tell(KEYS[3], now, 'held', ',"retries":' .. ARGV[5] .. ',"nesting":' .. ARGV[4])
    return 'held'
  end
  redis.call('ZREM', KEYS[10], id)
  redis.call('ZREM', KEYS[13], id)
elseif ARGV[14] == '1' then
  return 'orphan'
end

-- Ten-microsecond ticks since 2025, strictly increasing: the order of admission, and its time.
local time = redis.call('TIME')
local tick = (time[1] - 1735689600) * 100000 + math.floor(time[2] / 10)
tick = math.max(tick, tonumber(redis.call('GET', KEYS[12]) or '0') + 1)
redis.call('SET', KEYS[12], integer(tick))
local order = tonumber(ARGV[7]) * 2 ^ 47 + tick

redis.call('HDEL', record, 'attempt', 'devices', 'node', 'boot', 'proc', 'reason', 'next', 'next_list', 'placed_ms',
  'claimed_ms', 'started_ms', 'finished_ms', 'ended_ms', 'answered_ms', 'cancel')
redis.call('HSET', record, 'task', ARGV[3], 'nesting', ARGV[4], 'retries', ARGV[5], 'lane', ARGV[6],
  'priority', ARGV[7], 'order', integer(order), 'eta_ms', ARGV[8], 'expires_ms', ARGV[9], 'head', ARGV[10],
  'tail', ARGV[11], 'demand', ARGV[12], 'context_mib', ARGV[13], 'admitted_ms', integer(now), 'losses', '0')
redis.call('HINCRBY', record, 'run', 1)
redis.call('ZADD', KEYS[5], 'NX', integer(order), id)

if ARGV[15] ~= '' then
  move(record, KEYS[4], state, 'dead')
  redis.call('HSET', record, 'reason', ARGV[15])
  tell(KEYS[3], now, 'refused', because(ARGV[15]))
  close(record, KEYS[13], KEYS[11], id, now, true)
  owe_answer(KEYS[14], KEYS[9], id, 'dead', ARGV[15])
  return 'refused'
end

tell(KEYS[3], now, 'admitted', ',"estimate":' .. ARGV[17] .. ',"run":' .. redis.call('HGET', record, 'run'))
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
