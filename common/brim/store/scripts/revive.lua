-- A dead-lettered task is tried again: a new run on the same record, estimated anew by intake.
-- KEYS  1 record  2 story  3 counts  4 finished  5 lane (the unestimated one of its task)  6 lanes  7 changed  8 wake
-- ARGV  1 task id  2 lane  3 reason JSON (why it waits)
-- Returns  1 | 0 it is not dead, its envelope is gone, or its answer is still on the way

local known = redis.call('HMGET', KEYS[1], 'state', 'tail', 'answered_ms')
if known[1] ~= 'dead' or not known[2] or known[2] == '' or not known[3] then return 0 end
redis.call('HDEL', KEYS[1], 'attempt', 'devices', 'executor', 'node', 'boot', 'proc', 'ended_ms', 'answered_ms', 'cancel',
  'expires_ms', 'batch', 'size')
redis.call('HSET', KEYS[1], 'lane', ARGV[2], 'demand', '{"vram_mib":0}', 'context_mib', '0', 'losses', '0',
  'reason', ARGV[3])
local run = redis.call('HINCRBY', KEYS[1], 'run', 1)
redis.call('ZREM', KEYS[4], ARGV[1])
move(KEYS[1], KEYS[3], 'dead', 'waiting')
tell(KEYS[2], now_ms(), 'revived', ',"run":' .. integer(run))
enqueue(KEYS[1], KEYS[5], KEYS[6], KEYS[7], KEYS[8], ARGV[1])
return 1
