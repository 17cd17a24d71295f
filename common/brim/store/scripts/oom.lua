-- A running attempt ran out of GPU memory: its task waits again in its old place, with a demand that may have grown.
-- Its executor lives and keeps the reservation as a floor until it is measured.
--
-- KEYS  1 record  2 story  3 counts  4 changed  5 wake  6 availability  7 lane of the new demand  8 lanes
--       9 expiring  10 peaks  11.. books
-- ARGV  1 task id  2 attempt  3 proc  4 lane of the new demand  5 new demand JSON  6 context MiB  7 reason JSON
--       8 largest number of counted losses  9 what it held and had asked for in MiB, '' if unknown
-- Returns  "waiting" | "final" (it was lost too often, is to be cancelled, or a newer run is here: let it fail)
--          | "stale" | "unknown"

local record, id, attempt = KEYS[1], ARGV[1], ARGV[2]
local known = redis.call('HMGET', record, 'state', 'attempt', 'proc', 'next', 'cancel', 'losses', 'expires_ms',
  'sampled_mib', 'estimate')
local state, expires = known[1], known[7]
if not state then return 'unknown' end
if known[2] ~= attempt or known[3] ~= ARGV[3] or state ~= 'running' then return 'stale' end
if known[4] or known[5] or tonumber(known[6] or '0') + 1 >= tonumber(ARGV[8]) then return 'final' end

local now, peak = now_ms(), peak_of(ARGV[9], known[8])
for i = 11, #KEYS do
  local book = open_book(KEYS[i], attempt, ARGV[3])
  if i == 11 then note_peak(KEYS[10], id, attempt, book, peak, known[9], true) end
  release(book, attempt, nil, tonumber(ARGV[6]), now)
  show(book, KEYS[6], KEYS[4], KEYS[5])
end
redis.call('HDEL', record, 'attempt', 'devices', 'node', 'queue', 'boot', 'proc')
if peak then redis.call('HSET', record, 'peak_mib', peak) end
move(record, KEYS[3], state, 'waiting', 'reason', ARGV[7], 'lane', ARGV[4], 'demand', ARGV[5],
  'losses', integer(tonumber(known[6] or '0') + 1))
tell(KEYS[2], now, 'lost', ',"attempt":"' .. attempt .. '"' .. because(ARGV[7]) .. peaked(peak) .. ',"demand":' .. ARGV[5])
if expires and expires ~= '' then redis.call('ZADD', KEYS[9], expires, id) end
enqueue(record, KEYS[7], KEYS[8], KEYS[4], KEYS[5], id)
return 'waiting'
