-- Tells in its task's story that a live attempt uses more than is reserved for it.
-- KEYS  1 record  2 story
-- ARGV  1 attempt  2 reason JSON
-- Returns  1 | 0 it is not the live attempt

local known = redis.call('HMGET', KEYS[1], 'state', 'attempt')
if known[2] ~= ARGV[1] or not LIVE[known[1]] then return 0 end
tell(KEYS[2], now_ms(), 'outgrown', ',"attempt":"' .. ARGV[1] .. '"' .. because(ARGV[2]))
return 1
