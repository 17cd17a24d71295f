-- The start claim: a device's worker has taken an attempt's message from its queue.
-- KEYS  1 record  2 story  3 counts
-- ARGV  1 attempt  2 worker boot
-- Returns  "granted" (also when the same boot asks again) | "stale" | "unknown" | "cancelled"

local known = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'boot')
local state = known[1]
if not state then return 'unknown' end
if state == 'cancelled' then return 'cancelled' end
if known[2] ~= ARGV[1] then return 'stale' end
if state == 'claimed' and known[3] == ARGV[2] then return 'granted' end
if state ~= 'placed' then return 'stale' end
local now = now_ms()
move(KEYS[1], KEYS[3], state, 'claimed', 'boot', ARGV[2], 'claimed_ms', integer(now))
tell(KEYS[2], now, 'claimed', ',"attempt":"' .. ARGV[1] .. '"')
return 'granted'
