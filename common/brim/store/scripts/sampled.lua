-- Notes the most memory that samples have shown of a live attempt's process so far.
-- KEYS  1 record
-- ARGV  1 attempt  2 MiB
-- Returns  1 | 0 it is not the live attempt

local known = redis.call('HMGET', KEYS[1], 'state', 'attempt')
if known[2] ~= ARGV[1] or not LIVE[known[1]] then return 0 end
redis.call('HSET', KEYS[1], 'sampled_mib', ARGV[2])
return 1
