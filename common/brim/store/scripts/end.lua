-- Ends an attempt: lease removed, reservation turned into leftover, record closed, placement woken. Exactly once.
-- Where an executor names itself, it has not made the finish claim: this is it, and if it is granted, the result is stored
-- with the end.
--
-- KEYS  1 record  2 story  3 counts  4 changed  5 wake  6 availability  7 finished  8 expiring  9 outbox
--       10 awaited  11 peaks  12.. books, and behind them the result backend's key of the task, if there is a result
-- ARGV  1 task id  2 attempt  3 outcome state (a terminal one or handed_over)  4 reason JSON or ''
--       5 leftover MiB of the process per device, comma-separated; '' unknown (what it counts for stays until a
--         later report)  6 context MiB
--       7 peak MiB that frameworks have counted, '' if they have not
--       8 the process that makes the finish claim, '' if that has been made  9 ms by the clock of its machine
--       10 the result, nothing if there is none  11 seconds that it is kept, 0 for ever
-- Returns  "ended" | "promoted" (a newer run of the same id waited; it is back in its broker list) | "stale" | "unknown"
--          | "occupied" (there is a result already; nothing was done)
--
-- The broker list of a held next message is named by the record (next_list): it is one of intake's own lists.
-- A task that was asked to be cancelled while it ran has no next run: brim answers for it.

local record, id, attempt, claimer, result = KEYS[1], ARGV[1], ARGV[2], ARGV[8], ARGV[10]
local known = redis.call('HMGET', record, 'state', 'attempt', 'proc', 'next', 'cancel', 'sampled_mib', 'estimate',
  'expires_ms', 'finisher')
local state, proc, next_message, cancel = known[1], known[3] or '', known[4], known[5]
if not state then return 'unknown' end
if claimer ~= '' then
  if known[2] == attempt and not LIVE[state] and known[9] == claimer then return 'ended' end
  if state ~= 'running' or proc ~= claimer then return 'stale' end
end
if known[2] ~= attempt or not LIVE[state] then return 'stale' end
local last_book = #KEYS
if result then
  last_book = #KEYS - 1
  if redis.call('EXISTS', KEYS[#KEYS]) == 1 then return 'occupied' end
  if ARGV[11] == '0' then
    redis.call('SET', KEYS[#KEYS], result)
  else
    redis.call('SETEX', KEYS[#KEYS], ARGV[11], result)
  end
  redis.call('PUBLISH', KEYS[#KEYS], result)
end

local now, context = now_ms(), tonumber(ARGV[6])
local leftovers = {}
for amount in string.gmatch(ARGV[5], '[^,]+') do leftovers[#leftovers + 1] = tonumber(amount) end
local ran_out = ARGV[4] ~= '' and cjson.decode(ARGV[4]).code == 'out_of_memory'
local peak = peak_of(ARGV[7], known[6])
for i = 12, last_book do
  local book = open_book(KEYS[i], attempt, proc)
  if i == 12 then note_peak(KEYS[11], id, attempt, book, peak, known[7], ran_out) end
  release(book, attempt, leftovers[i - 11], context, now)
  show(book, KEYS[6], KEYS[4], KEYS[5])
end

local to, reason, promoted, owed = ARGV[3], ARGV[4], false, false
if cancel then
  owed = to == 'handed_over'
  if owed then to, reason = 'cancelled', cancel end
elseif next_message and not ANSWERED[to] then
  to, promoted = 'handed_over', true
end
local fields = { 'ended_ms', integer(now) }
local function note(field, value)
  fields[#fields + 1], fields[#fields + 2] = field, value
end
if reason ~= '' then note('reason', reason) end
if peak then note('peak_mib', peak) end
if claimer ~= '' then
  note('finished_ms', integer(now))
  note('finisher', claimer)
  note('finisher_ms', ARGV[9])
  tell(KEYS[2], now, 'finishing', ',"attempt":"' .. attempt .. '"')
end
move(record, KEYS[3], state, to, unpack(fields))
tell(KEYS[2], now, to, ',"attempt":"' .. attempt .. '"' .. because(reason) .. peaked(peak))
if to == 'handed_over' then
  hand_over(record, KEYS[10], KEYS[8], id, now)
else
  close(record, KEYS[7], KEYS[8], id, now, owed, known[8])
  if owed then owe_answer(KEYS[9], record, id, to, reason) end
end
return promoted and 'promoted' or 'ended'
