-- A model executor notes something about itself: what its batches stay below, or when it has computed for too long.
-- KEYS  1 executor  2 changed  3 wake
-- ARGV  1 executor id  2 field: ceiling | deadline_ms | ahead (the batch that was claimed ahead has begun)
--       3 value, '' none
-- Returns  1 | 0 it is gone

if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local ahead = redis.call('HGET', KEYS[1], 'ahead')
if ARGV[2] == 'ahead' and ahead then redis.call('HSET', KEYS[1], 'batch', ahead) end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[2]) else redis.call('HSET', KEYS[1], ARGV[2], ARGV[3]) end
if ARGV[2] ~= 'deadline_ms' then changed(KEYS[2], KEYS[3], 'x:' .. ARGV[1]) end
return 1
