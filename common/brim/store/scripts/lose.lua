-- An attempt was lost (its process, worker, node or message): the task waits again in its old place, or is
-- dead-lettered when it was lost too often. Its memory is released; where its process may still live, the process
-- keeps the reservation as a floor until it is measured or seen gone.
--
-- KEYS  1 record  2 story  3 counts  4 changed  5 wake  6 availability  7 finished  8 expiring  9 outbox  10 lane
--       11 lanes  12.. books
-- ARGV  1 task id  2 attempt  3 lane  4 reason JSON  5 "1" if it counts towards the limit  6 largest number of
--       counted losses  7 context MiB  8 "1" if it is lost only while no executor has begun it
-- Returns  "waiting" | "dead" | "promoted" | "moved" (the record's lane is another: ask again)
--          | "stale" (not the live attempt, or begun) | "unknown"

local record, id, attempt = KEYS[1], ARGV[1], ARGV[2]
local known = redis.call('HMGET', record, 'state', 'attempt', 'lane', 'next', 'next_list', 'losses', 'cancel',
  'proc')
local state = known[1]
if not state then return 'unknown' end
if known[2] ~= attempt or not LIVE[state] or (ARGV[8] == '1' and known[8]) then return 'stale' end
if known[3] ~= ARGV[3] then return 'moved' end

local now = now_ms()
for i = 12, #KEYS do
  release(KEYS[i], attempt, nil, tonumber(ARGV[7]), now)
  refresh(KEYS[i], KEYS[6], KEYS[4], KEYS[5])
end
redis.call('HDEL', record, 'attempt', 'devices', 'node', 'boot', 'proc')
local more = ',"attempt":"' .. attempt .. '"' .. because(ARGV[4])
if state == 'finishing' and known[4] then
  move(record, KEYS[3], state, 'handed_over')
  tell(KEYS[2], now, 'handed_over', more)
  redis.call('RPUSH', known[5], known[4])
  redis.call('HDEL', record, 'next', 'next_list')
  return 'promoted'
end
local losses = tonumber(known[6] or '0')
if ARGV[5] == '1' then losses = redis.call('HINCRBY', record, 'losses', 1) end
redis.call('HSET', record, 'reason', ARGV[4])
tell(KEYS[2], now, 'lost', more)
local to = nil
if known[7] then to = 'cancelled' elseif losses >= tonumber(ARGV[6]) then to = 'dead' end
if to then
  move(record, KEYS[3], state, to)
  tell(KEYS[2], now, to, because(ARGV[4]))
  close(record, KEYS[7], KEYS[8], id, now, true)
  owe_answer(KEYS[9], KEYS[5], id, to, ARGV[4])
  return to
end
move(record, KEYS[3], state, 'waiting')
enqueue(record, KEYS[10], KEYS[11], KEYS[4], KEYS[5], id)
return 'waiting'
