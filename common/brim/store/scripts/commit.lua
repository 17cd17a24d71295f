-- Commits placements, each all or nothing: checks again that it fits, reserves memory and an executor on every device,
-- writes the lease and pushes the message (requirements A3, A5). Each sees what those before it have reserved. Placement
-- hears of the devices with the next changes that wake it: it knows already what it has placed there.
--
-- KEYS  1 leader  2 counts  3 changed  4 wake  5 availability, then of each placement:
--       record  story  lane  device queue  its books, and if it asks for resources of its host, the node
-- ARGV  1 epoch  2 ahead  3 "1" to look at memory, "0" to ignore it, then of each placement:
--       1 task id  2 lane  3 attempt  4 slot (goes between head and tail)  5 vram MiB per device  6 node
--       7 devices, comma-separated  8 number of devices
--       9 what it asks for besides, '' nothing: "<thousandths of a host CPU>|<host RAM MiB>|<1 if it wishes for whole
--       GPUs: they must be empty, and all that they can give away is held>"
-- Returns  {} fenced, or for each placement "committed" (also when asked again) | "stale" (no longer waiting in this
--          lane) | {short resource, uuid (of host resources the node), missing amount} refused

if fenced(KEYS[1], ARGV[1]) then return {} end
local ahead, looks, now = tonumber(ARGV[2]), ARGV[3] == '1', integer(now_ms())
local books, placed, gone, quoted = {}, 0, {}, {}

local function available_mib(book)
  return book.total - book.headroom - book.external - committed_mib(book)
end

-- The devices of a placement, by UUID.
local function devices_of(at)
  if ARGV[at + 8] == '1' then return { ARGV[at + 7] } end
  local uuids = {}
  for uuid in string.gmatch(ARGV[at + 7], '[^,]+') do uuids[#uuids + 1] = uuid end
  return uuids
end

-- The books of a placement's devices. They are as their entries say, which are read all at once; only where nothing is
-- available, an attempt may have the device to itself, which stands in the book.
local function open_books(placements)
  local uuids, keys, known = {}, {}, {}
  for _, placement in ipairs(placements) do
    for i, uuid in ipairs(placement.devices) do
      if not known[uuid] then
        known[uuid] = true
        uuids[#uuids + 1], keys[#keys + 1] = uuid, KEYS[placement.key + 3 + i]
      end
    end
  end
  if #uuids == 0 then return end
  for i, entry in ipairs(redis.call('HMGET', KEYS[5], unpack(uuids))) do
    local book = entry and entry_book(keys[i], entry, {}, {})
    if not book or available_mib(book) <= 0 then book = open_book(keys[i]) end
    books[keys[i]] = book
  end
end

-- Writes what has been reserved so far.
local function settle()
  local members, entries = {}, {}
  for _, book in pairs(books) do
    local device = save(book)
    if device then
      members[#members + 1] = 'd:' .. device
      entries[#entries + 1], entries[#entries + 2] = device, book.entry
    end
  end
  if #members == 0 then return end
  redis.call('HSET', KEYS[5], unpack(entries))
  redis.call('SADD', KEYS[3], unpack(members))
end

-- What a device is short of, by the same checks in the same order as brim.core.placement.fit.shortage; nil if nothing.
local function shortage(book, vram, whole)
  local lacking = vram - available_mib(book)
  if whole then lacking = math.max(lacking, committed_mib(book)) end
  if book.state ~= 'up' then return 'state', 0 end
  if looks and lacking > 0 then return 'memory', lacking end
  if book.busy >= book.executors + ahead then return 'executors', book.busy - book.executors - ahead + 1 end
  return nil
end

-- The same of the host's resources, as brim.core.placement.fit.node_shortage; the node's devices are told changed then.
local function node_shortage(key, node, milli_cpus, ram)
  settle()
  local host = cjson.decode(redis.call('HGET', key, 'info') or '{"cpus":0,"ram_mib":0,"devices":[]}')
  local milli_used, ram_used = 0, 0
  for _, info in ipairs(host.devices) do
    local entry = redis.call('HGET', KEYS[5], info.uuid)
    local device = entry and cjson.decode(entry)
    if device and device.node == node then
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
    for _, info in ipairs(host.devices) do changed(KEYS[3], KEYS[4], 'd:' .. info.uuid) end
  end
  return short, missing
end

-- Takes an id out of its lane, with all others at the end.
local function leave(lane, id)
  local ids = gone[lane] or {}
  ids[#ids + 1] = id
  gone[lane] = ids
end

local function commit(placement)
  local key, at, devices, whole = placement.key, placement.at, placement.devices, placement.whole
  local record, story, lane, queue, first_book = KEYS[key], KEYS[key + 1], KEYS[key + 2], KEYS[key + 3], key + 4
  local milli_cpus, ram = placement.milli_cpus, placement.ram
  local id, attempt, node = ARGV[at + 1], ARGV[at + 3], ARGV[at + 6]
  local known = redis.call('HMGET', record, 'state', 'lane', 'head', 'tail', 'attempt', 'attempts', 'reason')
  if known[5] == attempt then return 'committed' end
  if known[1] ~= 'waiting' or known[2] ~= ARGV[at + 2] then
    leave(lane, id)
    return 'stale'
  end
  local vram, reserved = tonumber(ARGV[at + 5]), {}
  for i = 1, #devices do
    local book = books[KEYS[first_book + i - 1]]
    if not book.fixed then return { 'unknown', book.key, '0' } end
    local short, mib = shortage(book, vram, whole)
    if short then
      changed(KEYS[3], KEYS[4], 'd:' .. book.device)
      return { short, book.device, integer(mib) }
    end
    reserved[i] = book
  end
  if milli_cpus > 0 or ram > 0 then
    local short, missing = node_shortage(KEYS[first_book + #devices], node, milli_cpus, ram)
    if short then return { short, node, integer(missing) } end
  end

  for i, book in ipairs(reserved) do
    -- The host's part stands with the first device.
    if i == 2 then milli_cpus, ram = 0, 0 end
    local amount = whole and math.max(vram, available_mib(book)) or vram
    book.committed, book.busy = book.committed + amount, book.busy + 1
    book.milli_cpus, book.ram = book.milli_cpus + milli_cpus, book.ram + ram
    put(book, 'a:' .. attempt, string.format(HELD, amount, milli_cpus, ram, '', id))
    if whole and looks then
      book.whole = attempt
      put(book, 'whole', attempt)
    end
  end
  leave(lane, id)
  local attempts = tonumber(known[6] or '0')
  if attempts > 0 then
    redis.call('HDEL', record, 'executor', 'reason', 'boot', 'proc', 'claimed_ms', 'started_ms', 'finished_ms', 'finisher',
      'finisher_ms', 'peak_mib', 'sampled_mib')
  elseif known[7] then
    redis.call('HDEL', record, 'reason')
  end
  redis.call('HSET', record, 'state', 'placed', 'attempt', attempt, 'devices', ARGV[at + 7], 'node', node, 'queue', queue,
    'placed_ms', now, 'attempts', integer(attempts + 1))
  quoted[node] = quoted[node] or cjson.encode(node)
  tell(story, now, 'placed', ',"attempt":"' .. attempt .. '","node":' .. quoted[node] .. ',"devices":"'
    .. ARGV[at + 7] .. '","vram_mib":' .. ARGV[at + 5] .. (whole and ',"whole":true' or ''))
  redis.call('LPUSH', queue, known[3] .. ARGV[at + 4] .. known[4])
  placed = placed + 1
  return 'committed'
end

local placements, answers, key, at = {}, {}, 6, 3
while at < #ARGV do
  local milli_cpus, ram, whole = 0, 0, false
  if ARGV[at + 9] ~= '' then
    local milli, mib, wish = string.match(ARGV[at + 9], '^(%d+)|(%d+)|(%d)$')
    milli_cpus, ram, whole = tonumber(milli), tonumber(mib), wish == '1'
  end
  local devices = devices_of(at)
  placements[#placements + 1] = { key = key, at = at, devices = devices, milli_cpus = milli_cpus, ram = ram, whole = whole }
  key, at = key + 4 + #devices + ((milli_cpus > 0 or ram > 0) and 1 or 0), at + 9
end
open_books(placements)
for i, placement in ipairs(placements) do answers[i] = commit(placement) end
settle()
for lane, ids in pairs(gone) do redis.call('ZREM', lane, unpack(ids)) end
if placed > 0 then
  redis.call('HINCRBY', KEYS[2], 'waiting', -placed)
  redis.call('HINCRBY', KEYS[2], 'placed', placed)
end
return answers
