-- Ends an attempt: lease removed, reservation turned into leftover, record closed, placement woken. Exactly once.
--
-- KEYS  1 record  2 story  3 counts  4 changed  5 wake  6 availability  7 finished  8 expiring  9.. books
-- ARGV  1 task id  2 attempt  3 outcome state (a terminal one or handed_over)  4 reason JSON or ''
--       5 leftover MiB of the process per device, comma-separated; '' unknown (the reservation stays until a later
--         report)  6 context MiB  7 peak MiB or ''
-- Returns  "ended" | "promoted" (a newer run of the same id waited; it is back in its broker list) | "stale" | "unknown"
--
-- The broker list of a held next message is named by the record (next_list): it is one of intake's own lists.

local record, id, attempt = KEYS[1], ARGV[1], ARGV[2]
local known = redis.call('HMGET', record, 'state', 'attempt', 'next', 'next_list', 'cancel')
local state = known[1]
if not state then return 'unknown' end
if known[2] ~= attempt or not LIVE[state] then return 'stale' end

local now, context = now_ms(), tonumber(ARGV[6])
local leftovers = {}
for amount in string.gmatch(ARGV[5], '[^,]+') do leftovers[#leftovers + 1] = tonumber(amount) end
for i = 9, #KEYS do
  release(KEYS[i], attempt, leftovers[i - 8], context, now)
  refresh(KEYS[i], KEYS[6], KEYS[4], KEYS[5])
end

local to, reason = ARGV[3], ARGV[4]
local more = ',"attempt":"' .. attempt .. '"' .. because(reason)
if ARGV[7] ~= '' then
  redis.call('HSET', record, 'peak_mib', ARGV[7])
  more = more .. ',"peak_mib":' .. ARGV[7]
end
redis.call('HSET', record, 'ended_ms', integer(now))
if reason ~= '' then redis.call('HSET', record, 'reason', reason) end
if known[3] then
  move(record, KEYS[3], state, 'handed_over')
  tell(KEYS[2], now, 'handed_over', more)
  redis.call('RPUSH', known[4], known[3])
  redis.call('HDEL', record, 'next', 'next_list')
  return 'promoted'
end
move(record, KEYS[3], state, to)
tell(KEYS[2], now, to, more)
if to ~= 'handed_over' then close(record, KEYS[7], KEYS[8], id, now, false) end
return 'ended'
