-- Commits one placement: checks again that it fits, reserves memory and an executor on every device, writes the
-- lease and pushes the message (requirements A3, A5). All or nothing.
--
-- KEYS  1 leader  2 record  3 story  4 counts  5 lane  6 changed  7 wake  8 availability  9 device queue  10.. books
-- ARGV  1 epoch  2 task id  3 lane  4 attempt  5 slot (goes between head and tail)  6 vram MiB per device
--       7 ahead  8 node  9 devices, comma-separated  10 "1" to look at memory, "0" to ignore it
--       11 thousandths of a host CPU  12 host RAM MiB (placement alone keeps to what the node has of these)
-- Returns  {"committed"} (also when asked again) | {"fenced"} | {"stale"} (no longer waiting in this lane)
--          | {"refused", short resource, uuid, missing amount}

if fenced(KEYS[1], ARGV[1]) then return { 'fenced' } end
local record, id = KEYS[2], ARGV[2]
local known = redis.call('HMGET', record, 'state', 'lane', 'head', 'tail', 'attempt')
if known[5] == ARGV[4] then return { 'committed' } end
if known[1] ~= 'waiting' or known[2] ~= ARGV[3] then
  redis.call('ZREM', KEYS[5], id)
  return { 'stale' }
end

-- The same checks in the same order as brim.core.placement.fit.shortage.
local vram, ahead, books = tonumber(ARGV[6]), tonumber(ARGV[7]), {}
for i = 10, #KEYS do
  local book = read_book(KEYS[i])
  if not book.info then return { 'refused', 'unknown', KEYS[i], '0' } end
  local short, missing
  local available = book.info.total_mib - book.info.headroom_mib - book.external - book.committed
  if book.state ~= 'up' then
    short, missing = 'state', 0
  elseif ARGV[10] == '1' and available < vram then
    short, missing = 'memory', vram - available
  elseif book.busy >= book.info.executors + ahead then
    short, missing = 'executors', book.busy - book.info.executors - ahead + 1
  end
  if short then
    changed(KEYS[6], KEYS[7], 'd:' .. book.info.uuid)
    return { 'refused', short, book.info.uuid, integer(missing) }
  end
  books[#books + 1] = book
end

local now = now_ms()
for i, book in ipairs(books) do
  local first = i == 1
  book.attempts[ARGV[4]] = { vram = vram, milli_cpus = first and tonumber(ARGV[11]) or 0,
                             ram = first and tonumber(ARGV[12]) or 0, proc = '', id = id }
  write_attempt(book, ARGV[4])
  show(book, KEYS[8], KEYS[6], KEYS[7])
end
redis.call('ZREM', KEYS[5], id)
redis.call('HSET', record, 'attempt', ARGV[4], 'devices', ARGV[9], 'node', ARGV[8], 'queue', KEYS[9],
  'placed_ms', integer(now))
redis.call('HDEL', record, 'reason', 'boot', 'proc', 'claimed_ms', 'started_ms', 'finished_ms', 'finisher',
  'finisher_ms', 'peak_mib', 'sampled_mib')
redis.call('HINCRBY', record, 'attempts', 1)
move(record, KEYS[4], 'waiting', 'placed')
tell(KEYS[3], now, 'placed', ',"attempt":"' .. ARGV[4] .. '","node":' .. cjson.encode(ARGV[8]) .. ',"devices":"'
  .. ARGV[9] .. '","vram_mib":' .. integer(vram))
redis.call('LPUSH', KEYS[9], known[3] .. ARGV[5] .. known[4])
return { 'committed' }
