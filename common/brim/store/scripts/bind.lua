-- Binds an attempt to the executor process that is about to run it; from here on the process holds its memory.
-- KEYS  1 record  2 story  3 counts  4 availability  5 changed  6 wake  7.. books
-- ARGV  1 attempt  2 proc  3 the boot of its worker, whose start claim may be on its way still; '' claims nothing
-- Returns  {answer, the estimate's explanation as JSON or ''}
--   answer  "granted" (also when the same process asks again) | "doomed" (the process is about to be replaced: do
--           not run; its agent places the attempt again) | "stale" | "unknown" | "cancelled"

local known = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'proc', 'estimate')
local state = known[1]
if not state then return { 'unknown', '' } end
if state == 'cancelled' then return { 'cancelled', '' } end
if known[2] ~= ARGV[1] then return { 'stale', '' } end

local doomed, books = false, {}
for i = 7, #KEYS do
  local book = open_book(KEYS[i], ARGV[1], ARGV[2])
  if not book.attempts[ARGV[1]] then return { 'stale', '' } end
  local process = book.processes[ARGV[2]]
  doomed = doomed or (process and process.doomed)
  books[#books + 1] = book
end
local answer = doomed and 'doomed' or 'granted'
if state == 'running' and known[3] == ARGV[2] then return { answer, known[4] or '' } end
local claims = state == 'placed' and ARGV[3] ~= ''
if state ~= 'claimed' and not claims then return { 'stale', '' } end

for _, book in ipairs(books) do
  bind_holder(book, book.attempts[ARGV[1]], ARGV[2])
  put_attempt(book, ARGV[1])
  show(book, KEYS[4], KEYS[5], KEYS[6])
end
local now = now_ms()
if claims then
  take_placed(KEYS[1], KEYS[2], KEYS[3], now, ARGV[1], ARGV[3], 'running', 'proc', ARGV[2], 'started_ms', integer(now))
else
  move(KEYS[1], KEYS[3], state, 'running', 'proc', ARGV[2], 'started_ms', integer(now))
end
tell(KEYS[2], now, doomed and 'doomed' or 'started', ',"attempt":"' .. ARGV[1] .. '","proc":"' .. ARGV[2] .. '"')
return { answer, known[4] or '' }
