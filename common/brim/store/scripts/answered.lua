-- An answer from the outbox has been written to the result backend.
-- KEYS  1 outbox  2 record  3 story
-- ARGV  1 the outbox entry as it was read
-- Returns  1 | 0 it was no longer there

if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then return 0 end
local state = redis.call('HGET', KEYS[2], 'state')
if state then
  redis.call('HSET', KEYS[2], 'answered_ms', integer(now_ms()))
  redis.call('HDEL', KEYS[2], 'owed')
  if state ~= 'dead' then redis.call('HDEL', KEYS[2], 'head', 'tail') end
  tell(KEYS[3], now_ms(), 'answered')
end
return 1
