-- Binds an attempt to the executor process that is about to run it; from here on the process holds its memory.
-- KEYS  1 record  2 story  3 counts  4 availability  5 changed  6 wake  7.. books
-- ARGV  1 attempt  2 proc
-- Returns  "granted" (also when the same process asks again) | "doomed" (the process is about to be replaced: do
--          not run; its agent places the attempt again) | "stale" | "unknown" | "cancelled"

local known = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'proc')
local state = known[1]
if not state then return 'unknown' end
if state == 'cancelled' then return 'cancelled' end
if known[2] ~= ARGV[1] then return 'stale' end
if state == 'running' and known[3] == ARGV[2] then return 'granted' end
if state ~= 'claimed' then return 'stale' end

local doomed = false
for i = 7, #KEYS do
  local value = redis.call('HGET', KEYS[i], 'a:' .. ARGV[1])
  if not value then return 'stale' end
  local vram, id = string.match(value, '^(%d+)|[^|]*|(.*)$')
  redis.call('HSET', KEYS[i], 'a:' .. ARGV[1], vram .. '|' .. ARGV[2] .. '|' .. id)
  local process = redis.call('HGET', KEYS[i], 'p:' .. ARGV[2])
  if not process then
    redis.call('HSET', KEYS[i], 'p:' .. ARGV[2], format_process(fresh_process()))
  elseif parse_process(process).doomed then
    doomed = true
  end
  refresh(KEYS[i], KEYS[4], KEYS[5], KEYS[6])
end
local now = now_ms()
redis.call('HSET', KEYS[1], 'proc', ARGV[2], 'started_ms', integer(now))
move(KEYS[1], KEYS[3], state, 'running')
tell(KEYS[2], now, doomed and 'doomed' or 'started', ',"attempt":"' .. ARGV[1] .. '","proc":"' .. ARGV[2] .. '"')
return doomed and 'doomed' or 'granted'
