-- The start claim: a device's worker has taken an attempt's message from its queue, and may have begun it (bind.lua). If
-- it wants others that lie there, it gets them by the same step: where the claim cannot be answered, they stay.
-- KEYS  1 record  2 story  3 counts  4 the worker's queue, nothing to take none from it
-- ARGV  1 attempt  2 worker boot  3 largest number of messages to take
-- Returns  answer, or where there is a queue {answer, message, message, ...}
--   answer  "granted" (also when the same boot has it already) | "stale" | "unknown" | "cancelled"

local function claim()
  local known = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'boot')
  local state = known[1]
  if not state then return 'unknown' end
  if state == 'cancelled' then return 'cancelled' end
  if known[2] ~= ARGV[1] then return 'stale' end
  if known[3] == ARGV[2] then return 'granted' end
  if state ~= 'placed' then return 'stale' end
  take_placed(KEYS[1], KEYS[2], KEYS[3], now_ms(), ARGV[1], ARGV[2], 'claimed')
  return 'granted'
end

local answer = claim()
if not KEYS[4] then return answer end
return { answer, unpack(redis.call('RPOP', KEYS[4], ARGV[3]) or {}) }
