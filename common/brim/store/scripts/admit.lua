-- Admits messages from the broker's lists into records, or refuses them with a reason (DESIGN, "Intake"). Acts on one
-- only if its own LREM of the envelope succeeded, so a message is in the list or in a record, never between, and never
-- admitted twice, with any number of intake replicas.
--
-- KEYS  1 counts  2 tasks  3 lanes  4 changed  5 wake  6 scheduled  7 expiring  8 seq  9 finished  10 outbox  11 awaited
--       12 revoked, then of each message:
--       1 broker list  2 record  3 story  4 lane  5 lane that the record waits in
-- ARGV  1 reason JSON of a task that was revoked before it came, then of each message:
--       1 raw envelope  2 task id  3 task name  4 nesting  5 retries  6 lane  7 priority (0 first)
--       8 eta ms or ''  9 expires ms or ''  10 head  11 tail  12 demand JSON  13 context MiB
--       14 "1" if the envelope carries brim's attempt header with this very rank
--       15 refusal reason JSON or ''  16 why it must wait before it can be placed, JSON or ''
--       17 estimate's explanation, JSON  18 lane that the record waits in, '' if none
--       19 what a batched task is batched by, JSON, else ''  20 its size, else ''
-- Returns  for each message
--          "gone" (another replica took it) | "admitted" | "scheduled" | "refused" | "revoked" (cancelled at
--          once) | "held" (a run of this id still lives; kept as its next) | "redelivery"
--          | "orphan" (an attempt's message without record)
--          | "closed" (brim has given this id its last answer) | "moved" (a run of this id that waits in
--          another lane gives way: ask again; nothing was done)

local counts, tasks, lanes, scheduled, expiring, seq = KEYS[1], KEYS[2], KEYS[3], KEYS[6], KEYS[7], KEYS[8]
local finished, outbox, awaited, revoked = KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- Ten-microsecond ticks since 2025, strictly increasing: the order of admission, and its time.
local tick = math.max((time[1] - 1735689600) * 100000 + math.floor(time[2] / 10) - 1, tonumber(redis.call('GET', seq) or '0'))
local first_tick = tick
-- What is written once for all messages: counts, and lanes with what their tasks have in common.
local counted, grown, dropped_from = {}, {}, {}

local function add(state, number)
  if state then counted[state] = (counted[state] or 0) + number end
end

local function admit(list, record, story, lane_key, waits_in_key, at)
  local raw, id, task, nesting, retries = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4], ARGV[at + 5]
  local lane, eta, expires, waits_in = ARGV[at + 6], ARGV[at + 8], ARGV[at + 9], ARGV[at + 18]
  local refusal, wait, estimate, batch = ARGV[at + 15], ARGV[at + 16], ARGV[at + 17], ARGV[at + 19]
  local known = redis.call('HMGET', record, 'state', 'nesting', 'retries', 'lane', 'cancel', 'next_nesting', 'next_retries', 'run')
  local state = known[1]
  local newer = state and later(tonumber(nesting), tonumber(retries), tonumber(known[2]), tonumber(known[3]))
  if newer and state == 'waiting' and known[4] ~= waits_in then return 'moved' end
  if redis.call('LREM', list, -1, raw) == 0 then return 'gone' end
  if state then
    if not newer then return 'redelivery' end
    if LIVE[state] then
      if known[6] and not later(tonumber(nesting), tonumber(retries), tonumber(known[6]), tonumber(known[7])) then
        return 'redelivery'
      end
      redis.call('HSET', record, 'next', raw, 'next_list', list, 'next_nesting', nesting, 'next_retries', retries)
      tell(story, now, 'held', ',"retries":' .. retries .. ',"nesting":' .. nesting)
      return 'held'
    end
    if ANSWERED[state] or known[5] then
      tell(story, now, 'dropped', ',"retries":' .. retries .. ',"nesting":' .. nesting)
      return 'closed'
    end
    redis.call('ZREM', scheduled, id)
    redis.call('ZREM', expiring, id)
    redis.call('ZREM', finished, id)
    redis.call('ZREM', awaited, id)
    if state == 'waiting' then
      redis.call('ZREM', waits_in_key, id)
      dropped_from[#dropped_from + 1] = 'l:' .. waits_in
    end
    redis.call('HDEL', record, 'attempt', 'devices', 'executor', 'node', 'boot', 'proc', 'reason', 'placed_ms',
      'claimed_ms', 'started_ms', 'finished_ms', 'finisher', 'finisher_ms', 'ended_ms', 'batch', 'size')
  elseif ARGV[at + 14] == '1' then
    return 'orphan'
  end

  tick = tick + 1
  local order, run = overflow_order(ARGV[at + 7], tick, batch), integer(tonumber(known[8] or '0') + 1)
  local fields = { 'task', task, 'nesting', nesting, 'retries', retries, 'lane', lane, 'priority', ARGV[at + 7],
    'order', order, 'eta_ms', eta, 'expires_ms', expires, 'head', ARGV[at + 10], 'tail', ARGV[at + 11],
    'demand', ARGV[at + 12], 'context_mib', ARGV[at + 13], 'admitted_ms', integer(now), 'losses', '0', 'run', run }
  local function note(field, value)
    fields[#fields + 1], fields[#fields + 2] = field, value
  end
  if batch ~= '' then
    note('batch', batch)
    note('size', ARGV[at + 20])
  end
  redis.call('ZADD', tasks, 'NX', integer(tick), id)

  local to, answer, reason = 'waiting', 'admitted', wait
  if refusal ~= '' then
    to, answer, reason = 'dead', 'refused', refusal
  else
    note('estimate', estimate)
    tell(story, now, 'admitted', ',"estimate":' .. estimate .. ',"run":' .. run)
    if redis.call('ZSCORE', revoked, id) then
      to, answer, reason = 'cancelled', 'revoked', ARGV[1]
    elseif eta ~= '' and tonumber(eta) > now then
      to, answer, reason = 'scheduled', 'scheduled', ''
    end
  end
  if reason ~= '' then note('reason', reason) end
  if TERMINAL[to] then note('ended_ms', integer(now)) end
  redis.call('HSET', record, 'state', to, unpack(fields))
  add(state, -1)
  add(to, 1)
  if TERMINAL[to] then
    tell(story, now, answer == 'refused' and answer or to, because(reason))
    close(record, finished, expiring, id, now, true)
    owe_answer(outbox, record, id, to, reason)
    return answer
  end
  if expires ~= '' then redis.call('ZADD', expiring, expires, id) end
  if to == 'scheduled' then
    redis.call('ZADD', scheduled, eta, id)
    return answer
  end
  redis.call('ZADD', lane_key, order, id)
  grown[lane] = in_common(task, ARGV[at + 12], ARGV[at + 13], batch)
  return answer
end

local answers = {}
for at = 1, #ARGV - 1, 20 do
  local key = 13 + (at - 1) / 4
  answers[#answers + 1] = admit(KEYS[key], KEYS[key + 1], KEYS[key + 2], KEYS[key + 3], KEYS[key + 4], at)
end
if tick > first_tick then redis.call('SET', seq, integer(tick)) end
for state, number in pairs(counted) do
  if number ~= 0 then redis.call('HINCRBY', counts, state, number) end
end
for lane, common in pairs(grown) do
  redis.call('HSET', lanes, lane, common)
  changed(KEYS[4], KEYS[5], 'l:' .. lane)
end
for _, member in ipairs(dropped_from) do changed(KEYS[4], KEYS[5], member) end
return answers
