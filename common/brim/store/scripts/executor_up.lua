-- A model executor has loaded its model and takes items.
-- KEYS  1 executor  2 changed  3 wake  4 residency
-- ARGV  1 executor id  2 worker boot
-- Returns  1 | 0 it drains already, or is another's

local known = redis.call('HMGET', KEYS[1], 'state', 'boot')
if known[1] ~= 'starting' or known[2] ~= ARGV[2] then return 0 end
local now = integer(now_ms())
redis.call('HSET', KEYS[1], 'state', 'up', 'since_ms', now, 'used_ms', now)
reside(KEYS[4], ARGV[1], 'up')
changed(KEYS[2], KEYS[3], 'x:' .. ARGV[1])
return 1
