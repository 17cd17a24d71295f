-- A model executor takes no more items: every commit to it is refused from here on, and its agent stops it once it
-- holds none.
-- KEYS  1 executor  2 changed  3 wake  4 residency  5 leader
-- ARGV  1 executor id  2 reason JSON  3 fencing epoch of a placement that says so, '' if an agent or the executor does
-- Returns  1 | 0 it drains already, or is gone | -1 fenced

if ARGV[3] ~= '' and fenced(KEYS[5], ARGV[3]) then return -1 end
local state = redis.call('HGET', KEYS[1], 'state')
if not state or state == 'draining' then return 0 end
redis.call('HSET', KEYS[1], 'state', 'draining', 'since_ms', integer(now_ms()), 'reason', ARGV[2])
reside(KEYS[4], ARGV[1], 'draining', because(ARGV[2]))
changed(KEYS[2], KEYS[3], 'x:' .. ARGV[1])
return 1
