-- Closes a task whose function does not run: cancelled, expired, or dead-lettered; the answer goes to the outbox.
-- A running one is only marked to be cancelled: its worker ends it.
--
-- KEYS  1 record  2 story  3 counts  4 changed  5 wake  6 availability  7 finished  8 expiring  9 outbox
--       10 scheduled  11 awaited  12 leader  13 lane  14.. books of the attempt, if it has one
-- ARGV  1 task id  2 terminal state  3 reason JSON  4 states it may be closed in, comma-separated
--       5 lane, '' if none  6 attempt, '' if none  7 context MiB
--       8 fencing epoch of a placement that says so, '' if somebody else does
-- Returns  "closed" | "marked" (it runs; the cancellation is noted) | "moved" (lane or attempt changed: ask again)
--          | "refused" (not in one of those states; where it was to expire, it does not any more) | "unknown" | "fenced"

if ARGV[8] ~= '' and fenced(KEYS[12], ARGV[8]) then return 'fenced' end
local record, id, to = KEYS[1], ARGV[1], ARGV[2]
local known = redis.call('HMGET', record, 'state', 'lane', 'attempt', 'proc', 'expires_ms')
local state = known[1]
if not state or not string.find(',' .. ARGV[4] .. ',', ',' .. state .. ',', 1, true) then
  if to == 'expired' then redis.call('ZREM', KEYS[8], id) end
  return state and 'refused' or 'unknown'
end
if known[2] ~= ARGV[5] or (LIVE[state] and known[3] ~= ARGV[6]) then return 'moved' end
local now = now_ms()
if state == 'running' or state == 'finishing' then
  redis.call('HSET', record, 'cancel', ARGV[3])
  tell(KEYS[2], now, 'cancelling', because(ARGV[3]))
  return 'marked'
end
if LIVE[state] then
  for i = 14, #KEYS do
    local book = open_book(KEYS[i], ARGV[6], known[4] or '')
    release(book, ARGV[6], nil, tonumber(ARGV[7]), now)
    show(book, KEYS[6], KEYS[4], KEYS[5])
  end
end
redis.call('ZREM', KEYS[10], id)
redis.call('ZREM', KEYS[11], id)
redis.call('ZREM', KEYS[13], id)
changed(KEYS[4], KEYS[5], 'l:' .. ARGV[5])
move(record, KEYS[3], state, to, 'reason', ARGV[3], 'ended_ms', integer(now))
tell(KEYS[2], now, to, because(ARGV[3]))
close(record, KEYS[7], KEYS[8], id, now, true, known[5])
owe_answer(KEYS[9], record, id, to, ARGV[3])
return 'closed'
