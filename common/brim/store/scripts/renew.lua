-- Renews a node's leases; also how an agent says that it drains.
-- KEYS  1 node
-- ARGV  1 boot  2 state: up | draining
-- Returns  1 | 0 refused: another boot took over, or the node was declared lost

local known = redis.call('HMGET', KEYS[1], 'boot', 'state')
if known[1] ~= ARGV[1] or known[2] == 'lost' then return 0 end
redis.call('HSET', KEYS[1], 'renewed_ms', integer(now_ms()), 'state', ARGV[2])
return 1
