-- Removes a finished record whose retention is over, once nobody waits for brim's answer any more.
-- KEYS  1 record  2 story  3 counts  4 finished  5 tasks
-- ARGV  1 task id
-- Returns  1 | 0 it is not finished, or its answer is still owed

local known = redis.call('HMGET', KEYS[1], 'state', 'owed')
local state = known[1]
if state and (not TERMINAL[state] or known[2]) then return 0 end
if state then redis.call('HINCRBY', KEYS[3], state, -1) end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('ZREM', KEYS[5], ARGV[1])
return 1
