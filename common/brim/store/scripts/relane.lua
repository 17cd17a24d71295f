-- A waiting task gets another demand (its signature has come, or its estimate was raised).
-- KEYS  1 record  2 story  3 old lane  4 new lane  5 lanes  6 changed  7 wake
-- ARGV  1 task id  2 old lane  3 new lane  4 demand JSON  5 context MiB  6 estimate's explanation, JSON  7 priority
--       8 what a batched task is batched by, JSON, else ''  9 its size, else ''
-- Returns  1 moved | 0 it does not wait in the old lane

local known = redis.call('HMGET', KEYS[1], 'state', 'lane', 'order')
redis.call('ZREM', KEYS[3], ARGV[1])
if known[1] ~= 'waiting' or known[2] ~= ARGV[2] then return 0 end
local order = overflow_order(ARGV[7], tonumber(known[3]) % PRIORITY_STEP, ARGV[8])
redis.call('HSET', KEYS[1], 'lane', ARGV[3], 'demand', ARGV[4], 'context_mib', ARGV[5], 'priority', ARGV[7],
  'order', order, 'estimate', ARGV[6])
redis.call('HDEL', KEYS[1], 'reason', 'batch', 'size')
if ARGV[8] ~= '' then redis.call('HSET', KEYS[1], 'batch', ARGV[8], 'size', ARGV[9]) end
tell(KEYS[2], now_ms(), 'estimated', ',"estimate":' .. ARGV[6])
enqueue(KEYS[1], KEYS[4], KEYS[5], KEYS[6], KEYS[7], ARGV[1])
changed(KEYS[6], KEYS[7], 'l:' .. ARGV[2])
return 1
