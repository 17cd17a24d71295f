-- A scheduled task whose time has come goes to overflow.
-- KEYS  1 scheduled  2 record  3 story  4 counts  5 lane  6 lanes  7 changed  8 wake
-- ARGV  1 task id  2 lane
-- Returns  1 moved | 0 not due, not scheduled, or its lane is another by now

local now = now_ms()
local eta = redis.call('ZSCORE', KEYS[1], ARGV[1])
local known = redis.call('HMGET', KEYS[2], 'state', 'lane')
if not eta or tonumber(eta) > now then return 0 end
if known[1] ~= 'scheduled' then
  redis.call('ZREM', KEYS[1], ARGV[1])
  return 0
end
if known[2] ~= ARGV[2] then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
move(KEYS[2], KEYS[4], 'scheduled', 'waiting')
tell(KEYS[3], now, 'due')
enqueue(KEYS[2], KEYS[5], KEYS[6], KEYS[7], KEYS[8], ARGV[1])
return 1
