-- Takes or keeps the placement lease. A new holder gets a higher fencing epoch.
-- KEYS  1 leader
-- ARGV  1 holder  2 time to live in ms
-- Returns  {epoch or 0 while another holds it, ms until the lease runs out}

local now = now_ms()
local known = redis.call('HMGET', KEYS[1], 'holder', 'until_ms', 'epoch')
local mine = known[1] == ARGV[1]
local until_ms = tonumber(known[2] or '0')
if not mine and until_ms > now then return { 0, integer(until_ms - now) } end
local epoch = tonumber(known[3] or '0')
if not mine then epoch = redis.call('HINCRBY', KEYS[1], 'epoch', 1) end
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'until_ms', integer(now + tonumber(ARGV[2])))
return { epoch, ARGV[2] }
