-- The finish claim: the user's function is over, before callbacks and result. Only one of the live attempt's two
-- processes gets it. The worker's main process claims for an attempt that it is about to answer itself: one that no
-- executor has begun, that it is about to kill, or whose executor is done with it and has left the answer to it.
-- KEYS  1 record  2 story  3 counts
-- ARGV  1 attempt  2 proc, '' the worker's main process  3 "1" if the executor is done and has left it to the main process
--       4 ms by the clock of the machine that claims: what its result will be dated by
-- Returns  "granted" (also when the same process asks again) | "stale" | "unknown" | "cancelled"

local known = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'proc', 'finisher')
local state = known[1]
if not state then return 'unknown' end
if state == 'cancelled' then return 'cancelled' end
local main = ARGV[2] == ''
if known[2] ~= ARGV[1] or not (main or known[3] == ARGV[2]) then return 'stale' end
if state == 'finishing' then
  if known[4] == ARGV[2] then return 'granted' end
  if not main or ARGV[3] ~= '1' then return 'stale' end
elseif state ~= 'running' and not (main and state == 'claimed') then
  return 'stale'
end
if state == 'finishing' then
  redis.call('HSET', KEYS[1], 'finisher', ARGV[2], 'finisher_ms', ARGV[4])
  return 'granted'
end
local now = now_ms()
move(KEYS[1], KEYS[3], state, 'finishing', 'finished_ms', integer(now), 'finisher', ARGV[2], 'finisher_ms', ARGV[4])
tell(KEYS[2], now, 'finishing', ',"attempt":"' .. ARGV[1] .. '"')
return 'granted'
