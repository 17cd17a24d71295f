-- Commits one placement: checks again that it fits, reserves memory and an executor on every device, writes the
-- lease and pushes the message (requirements A3, A5). All or nothing.
--
-- KEYS  1 leader  2 record  3 story  4 counts  5 lane  6 changed  7 wake  8 availability  9 device queue  10 node
--       11.. books
-- ARGV  1 epoch  2 task id  3 lane  4 attempt  5 slot (goes between head and tail)  6 vram MiB per device
--       7 ahead  8 node  9 devices, comma-separated  10 "1" to look at memory, "0" to ignore it
--       11 thousandths of a host CPU  12 host RAM MiB  13 "1" if it wishes for whole GPUs: they must be empty, and
--       all that they can give away is held
-- Returns  {"committed"} (also when asked again) | {"fenced"} | {"stale"} (no longer waiting in this lane)
--          | {"refused", short resource, uuid (of host resources the node), missing amount}

if fenced(KEYS[1], ARGV[1]) then return { 'fenced' } end
local record, id = KEYS[2], ARGV[2]
local known = redis.call('HMGET', record, 'state', 'lane', 'head', 'tail', 'attempt')
if known[5] == ARGV[4] then return { 'committed' } end
if known[1] ~= 'waiting' or known[2] ~= ARGV[3] then
  redis.call('ZREM', KEYS[5], id)
  return { 'stale' }
end

-- The same checks in the same order as brim.core.placement.fit.shortage and node_shortage.
local vram, ahead, looks, whole = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[10] == '1', ARGV[13] == '1'
local books, amounts = {}, {}
for i = 11, #KEYS do
  local book = read_book(KEYS[i])
  if not book.info then return { 'refused', 'unknown', KEYS[i], '0' } end
  local short, missing
  local available = book.info.total_mib - book.info.headroom_mib - book.external - book.committed
  local lacking = vram - available
  if whole then lacking = math.max(lacking, book.committed) end
  if book.state ~= 'up' then
    short, missing = 'state', 0
  elseif looks and lacking > 0 then
    short, missing = 'memory', lacking
  elseif book.busy >= book.info.executors + ahead then
    short, missing = 'executors', book.busy - book.info.executors - ahead + 1
  end
  if short then
    changed(KEYS[6], KEYS[7], 'd:' .. book.info.uuid)
    return { 'refused', short, book.info.uuid, integer(missing) }
  end
  books[#books + 1], amounts[#amounts + 1] = book, whole and math.max(vram, available) or vram
end

local milli_cpus, ram = tonumber(ARGV[11]), tonumber(ARGV[12])
if milli_cpus > 0 or ram > 0 then
  local host = cjson.decode(redis.call('HGET', KEYS[10], 'info') or '{"cpus":0,"ram_mib":0,"devices":[]}')
  local milli_used, ram_used = 0, 0
  for _, info in ipairs(host.devices) do
    local entry = redis.call('HGET', KEYS[8], info.uuid)
    local device = entry and cjson.decode(entry)
    if device and device.node == ARGV[8] then
      milli_used, ram_used = milli_used + math.floor(device.cpus_used * 1000 + 0.5), ram_used + device.ram_used_mib
    end
  end
  local short, missing
  local milli_missing = milli_cpus - math.floor(host.cpus * 1000 + 0.5) + milli_used
  local ram_missing = ram - host.ram_mib + ram_used
  if host.cpus > 0 and milli_missing > 0 then
    short, missing = 'cpus', milli_missing
  elseif host.ram_mib > 0 and ram_missing > 0 then
    short, missing = 'ram', ram_missing
  end
  if short then
    for _, info in ipairs(host.devices) do changed(KEYS[6], KEYS[7], 'd:' .. info.uuid) end
    return { 'refused', short, ARGV[8], integer(missing) }
  end
end

local now = now_ms()
for i, book in ipairs(books) do
  local first = i == 1
  book.attempts[ARGV[4]] = { vram = amounts[i], milli_cpus = first and milli_cpus or 0, ram = first and ram or 0,
                             proc = '', id = id }
  write_attempt(book, ARGV[4])
  if whole and looks then
    book.whole = ARGV[4]
    redis.call('HSET', book.key, 'whole', ARGV[4])
  end
  show(book, KEYS[8], KEYS[6], KEYS[7])
end
redis.call('ZREM', KEYS[5], id)
redis.call('HSET', record, 'attempt', ARGV[4], 'devices', ARGV[9], 'node', ARGV[8], 'queue', KEYS[9],
  'placed_ms', integer(now))
redis.call('HDEL', record, 'executor', 'reason', 'boot', 'proc', 'claimed_ms', 'started_ms', 'finished_ms', 'finisher',
  'finisher_ms', 'peak_mib', 'sampled_mib')
redis.call('HINCRBY', record, 'attempts', 1)
move(record, KEYS[4], 'waiting', 'placed')
tell(KEYS[3], now, 'placed', ',"attempt":"' .. ARGV[4] .. '","node":' .. cjson.encode(ARGV[8]) .. ',"devices":"'
  .. ARGV[9] .. '","vram_mib":' .. integer(vram) .. (whole and ',"whole":true' or ''))
redis.call('LPUSH', KEYS[9], known[3] .. ARGV[5] .. known[4])
return { 'committed' }
