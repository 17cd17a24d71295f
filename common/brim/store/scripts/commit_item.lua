-- Commits an item to a model executor, from level 1 or from a sibling that has not sealed it (requirements B1, B2,
-- B7, B8). It reserves nothing on the device: its executor has.
--
-- KEYS  1 leader  2 record  3 story  4 counts  5 lane  6 changed  7 wake  8 executor  9 executor's queue
--       10 the sibling that holds it, else the executor again
-- ARGV  1 epoch  2 task id  3 lane  4 attempt  5 slot (goes between head and tail)  6 JSON for the executor's book
--       7 node  8 device  9 executor id  10 its attempt at the sibling, '' from level 1  11 sibling's id
--       12 why it leaves the sibling, JSON
-- Returns  "committed" (also when asked again) | "fenced" | "stale" (no longer waiting, or sealed meanwhile)
--          | "refused" (the executor drains, or is gone)

if fenced(KEYS[1], ARGV[1]) then return 'fenced' end
local record, id, attempt, before = KEYS[2], ARGV[2], ARGV[4], ARGV[10]
local known = redis.call('HMGET', record, 'state', 'lane', 'head', 'tail', 'attempt')
if known[5] == attempt then return 'committed' end
if redis.call('HGET', KEYS[8], 'state') ~= 'up' then
  changed(KEYS[6], KEYS[7], 'x:' .. ARGV[9])
  return 'refused'
end
local now = now_ms()
if before == '' then
  if known[1] ~= 'waiting' or known[2] ~= ARGV[3] then
    redis.call('ZREM', KEYS[5], id)
    return 'stale'
  end
  redis.call('ZREM', KEYS[5], id)
  move(record, KEYS[4], 'waiting', 'placed')
else
  local held = redis.call('HGET', KEYS[10], 'i:' .. before)
  if known[1] ~= 'placed' or known[5] ~= before or not held or string.sub(held, 1, 1) == '1' then return 'stale' end
  redis.call('HDEL', KEYS[10], 'i:' .. before)
  tell(KEYS[3], now, 'lost', ',"attempt":"' .. before .. '"' .. because(ARGV[12]))
  changed(KEYS[6], KEYS[7], 'x:' .. ARGV[11])
end
redis.call('HSET', KEYS[8], 'i:' .. attempt, '0' .. ARGV[6], 'used_ms', integer(now))
redis.call('HSET', record, 'attempt', attempt, 'devices', ARGV[8], 'executor', ARGV[9], 'node', ARGV[7],
  'queue', KEYS[9], 'placed_ms', integer(now))
redis.call('HDEL', record, 'reason', 'boot', 'proc', 'claimed_ms', 'started_ms', 'finished_ms', 'finisher',
  'peak_mib', 'sampled_mib')
redis.call('HINCRBY', record, 'attempts', 1)
tell(KEYS[3], now, 'placed', ',"attempt":"' .. attempt .. '","node":' .. cjson.encode(ARGV[7]) .. ',"devices":"'
  .. ARGV[8] .. '","executor":' .. cjson.encode(ARGV[9]) .. ',"vram_mib":0')
redis.call('LPUSH', KEYS[9], known[3] .. ARGV[5] .. known[4])
return 'committed'
