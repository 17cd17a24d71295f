-- An attempt was lost (its process, worker, node or message): the task waits again in its old place, or is
-- dead-lettered when it was lost too often. Its memory is released; where its process may still live, the process
-- keeps the reservation as a floor until it is measured or seen gone.
--
-- KEYS  1 record  2 story  3 counts  4 changed  5 wake  6 availability  7 finished  8 expiring  9 outbox  10 lane
--       11 lanes  12 awaited  13 leader  14 peaks  15.. books
-- ARGV  1 task id  2 attempt  3 lane  4 reason JSON  5 "1" if it counts towards the limit  6 largest number of
--       counted losses  7 context MiB  8 state in which it was seen and given up
--       9 fencing epoch of a placement that says so, '' if somebody else does
-- Returns  "waiting" | "dead" | "cancelled" (it had been asked to end) | "promoted" (a newer run is here already)
--          | "moved" (the record's lane is another: ask again) | "stale" (not the live attempt, or it has gone on)
--          | "unknown" | "fenced"

if ARGV[9] ~= '' and fenced(KEYS[13], ARGV[9]) then return 'fenced' end
local record, id, attempt = KEYS[1], ARGV[1], ARGV[2]
local known = redis.call('HMGET', record, 'state', 'attempt', 'lane', 'next', 'losses', 'cancel', 'expires_ms',
  'proc', 'sampled_mib', 'estimate')
local state, next_message, cancel, expires, proc = known[1], known[4], known[6], known[7], known[8] or ''
if not state then return 'unknown' end
if known[2] ~= attempt or not LIVE[state] or state ~= ARGV[8] then return 'stale' end
if known[3] ~= ARGV[3] then return 'moved' end

local now = now_ms()
-- Outgrowing its reservation is all that a loss tells about a task's need: at least what was seen of it.
local peak = cjson.decode(ARGV[4]).code == 'outgrew' and peak_of('', known[9]) or nil
for i = 15, #KEYS do
  local book = open_book(KEYS[i], attempt, proc)
  if i == 15 then note_peak(KEYS[14], id, attempt, book, peak, known[10], true) end
  release(book, attempt, nil, tonumber(ARGV[7]), now)
  show(book, KEYS[6], KEYS[4], KEYS[5])
end
redis.call('HDEL', record, 'attempt', 'devices', 'executor', 'node', 'queue', 'boot', 'proc')
redis.call('HSET', record, 'reason', ARGV[4])
if peak then redis.call('HSET', record, 'peak_mib', peak) end
tell(KEYS[2], now, 'lost', ',"attempt":"' .. attempt .. '"' .. because(ARGV[4]) .. peaked(peak))
if next_message and not cancel then
  move(record, KEYS[3], state, 'handed_over')
  tell(KEYS[2], now, 'handed_over')
  hand_over(record, KEYS[12], KEYS[8], id, now)
  return 'promoted'
end
local losses = tonumber(known[5] or '0')
if ARGV[5] == '1' then losses = redis.call('HINCRBY', record, 'losses', 1) end
local to, reason = nil, ARGV[4]
if cancel then
  to, reason = 'cancelled', cancel
elseif losses >= tonumber(ARGV[6]) then
  to = 'dead'
end
if to then
  move(record, KEYS[3], state, to, 'reason', reason, 'ended_ms', integer(now))
  tell(KEYS[2], now, to, because(reason))
  close(record, KEYS[7], KEYS[8], id, now, true, expires)
  owe_answer(KEYS[9], record, id, to, reason)
  return to
end
move(record, KEYS[3], state, 'waiting')
if expires and expires ~= '' then redis.call('ZADD', KEYS[8], expires, id) end
enqueue(record, KEYS[10], KEYS[11], KEYS[4], KEYS[5], id)
return 'waiting'
