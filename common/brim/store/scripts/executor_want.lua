-- Placement wants a model executor: its memory is reserved here, and its node's agent starts it (DESIGN, "Two-level
-- batching"). Checks again that it fits, as committing a placement does.
--
-- KEYS  1 leader  2 executors  3 executor  4 book  5 availability  6 changed  7 wake  8 residency
-- ARGV  1 epoch  2 executor id  3 JSON of what does not change (node, device, index, queue, model, version, vram_mib,
--       profile)  4 vram MiB
-- Returns  {"wanted"} | {"fenced"} | {"exists"} | {"refused", short resource, missing amount}

if fenced(KEYS[1], ARGV[1]) then return { 'fenced' } end
if redis.call('EXISTS', KEYS[3]) == 1 then return { 'exists' } end
local book, vram = read_book(KEYS[4]), tonumber(ARGV[4])
if not book.fixed or book.state ~= 'up' then return { 'refused', 'state', '0' } end
local available = book.total - book.headroom - book.external - committed_mib(book)
if available < vram then
  changed(KEYS[6], KEYS[7], 'd:' .. book.device)
  return { 'refused', 'memory', integer(vram - available) }
end
local now = integer(now_ms())
book.residents[ARGV[2]] = { vram = vram, proc = '' }
weigh_holder(book, book.residents[ARGV[2]], 1)
put_resident(book, ARGV[2])
redis.call('HSET', KEYS[3], 'id', ARGV[2], 'about', ARGV[3], 'state', 'starting', 'since_ms', now, 'used_ms', now)
redis.call('SADD', KEYS[2], ARGV[2])
reside(KEYS[8], ARGV[2], 'wanted', ',"device":' .. cjson.encode(book.device) .. ',"vram_mib":' .. integer(vram))
show(book, KEYS[5], KEYS[6], KEYS[7])
changed(KEYS[6], KEYS[7], 'x:' .. ARGV[2])
return { 'wanted' }
