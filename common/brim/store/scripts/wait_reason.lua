-- Notes why a lane's head waits.
-- KEYS  1 leader  2 record
-- ARGV  1 epoch  2 reason JSON
-- Returns  1 | 0 fenced, or it no longer waits

if fenced(KEYS[1], ARGV[1]) or redis.call('HGET', KEYS[2], 'state') ~= 'waiting' then return 0 end
redis.call('HSET', KEYS[2], 'reason', ARGV[2])
return 1
