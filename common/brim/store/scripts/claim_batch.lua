-- A model executor has sealed a batch: start claim and bind of all its items at once.
-- KEYS  1 executor  2 counts  3 changed  4 wake  5.. record and story of each item
-- ARGV  1 worker boot  2 proc  3 executor id  4 "1" another batch is being computed | "0" | '' this is no batch
--       5.. attempts, in the order of the records
-- Returns  for each item "granted" (also when the same boot asks again) | "stale" (also one that has expired, which
--          placement closes) | "unknown" | "cancelled"

local now, answers, granted = now_ms(), {}, 0
local sealed = ',"proc":"' .. ARGV[2] .. '","batch":' .. #ARGV - 4
for i = 5, #ARGV do
  local record, story, attempt = KEYS[2 * i - 5], KEYS[2 * i - 4], ARGV[i]
  local known = redis.call('HMGET', record, 'state', 'attempt', 'boot', 'expires_ms')
  local state, held = known[1], redis.call('HGET', KEYS[1], 'i:' .. attempt)
  local answer = 'stale'
  if not state then
    answer = 'unknown'
  elseif state == 'cancelled' then
    answer = 'cancelled'
  elseif held and known[2] == attempt and state == 'running' and known[3] == ARGV[1] then
    answer = 'granted'
  elseif held and known[2] == attempt and state == 'placed' and now < (tonumber(known[4] or '') or math.huge) then
    answer = 'granted'
    redis.call('HSET', KEYS[1], 'i:' .. attempt, '1' .. string.sub(held, 2))
    move(record, KEYS[2], state, 'running', 'boot', ARGV[1], 'proc', ARGV[2], 'claimed_ms', integer(now),
      'started_ms', integer(now))
    tell(story, now, 'started', ',"attempt":"' .. attempt .. '"' .. sealed)
  end
  answers[i - 4] = answer
  if answer == 'granted' then granted = granted + 1 end
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSET', KEYS[1], 'used_ms', integer(now))
  if ARGV[4] == '1' and granted > 0 then
    redis.call('HSET', KEYS[1], 'ahead', granted)
  elseif ARGV[4] ~= '' then
    redis.call('HDEL', KEYS[1], 'ahead')
    if ARGV[4] == '0' then redis.call('HSET', KEYS[1], 'batch', granted) end
  end
end
changed(KEYS[3], KEYS[4], 'x:' .. ARGV[3])
return answers
