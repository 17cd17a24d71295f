-- Gives the placement lease back, so that a standby takes over at once.
-- KEYS  1 leader
-- ARGV  1 holder
-- Returns  1 | 0 it was another's

if redis.call('HGET', KEYS[1], 'holder') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'until_ms', '0')
return 1
