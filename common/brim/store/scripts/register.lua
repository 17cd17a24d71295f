-- A node agent announces its node and devices. It has made sure before that nothing of an earlier boot runs.
-- Devices of an earlier registration that are not there any more leave the table.
-- KEYS  1 node  2 nodes  3 availability  4 changed  5 wake  6 taskset  7 signatures  8.. books of the devices, then
--       those of the devices that are gone
-- ARGV  1 node  2 boot  3 JSON {labels, cpus, ram_mib, devices: [info...]}  4 task names, JSON list
--       5 signatures, JSON {name: text}  6 state that the devices begin in  7.. devices that are gone
-- Returns  "registered" | "attempts" (attempts or model executors of an earlier boot are still in the books: end them first)
--          | "moved" (other devices are gone: ask again)

local node, expected = cjson.decode(ARGV[3]), {}
for _, info in ipairs(node.devices) do expected[info.uuid] = true end
for i = 7, #ARGV do expected[ARGV[i]] = true end
local earlier = redis.call('HGET', KEYS[1], 'info')
for _, info in ipairs(earlier and cjson.decode(earlier).devices or {}) do
  if not expected[info.uuid] then return 'moved' end
end
for i = 8, #KEYS do
  local book = read_book(KEYS[i])
  if next(book.attempts) or next(book.residents) then return 'attempts' end
end
for i, info in ipairs(node.devices) do
  local key = KEYS[i + 7]
  redis.call('DEL', key)
  redis.call('HSET', key, 'info', cjson.encode(info), 'state', ARGV[6], 'external', '0')
  show(read_book(key), KEYS[3], KEYS[4], KEYS[5])
end
for i = 7, #ARGV do
  redis.call('DEL', KEYS[#node.devices + 1 + i])
  redis.call('HDEL', KEYS[3], ARGV[i])
  changed(KEYS[4], KEYS[5], 'd:' .. ARGV[i])
end
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'boot', ARGV[2], 'state', 'up', 'renewed_ms', integer(now_ms()), 'info', ARGV[3])
for _, name in ipairs(cjson.decode(ARGV[4])) do redis.call('SADD', KEYS[6], name) end
for name, signature in pairs(cjson.decode(ARGV[5])) do redis.call('HSET', KEYS[7], name, signature) end
changed(KEYS[4], KEYS[5], 'n:' .. ARGV[1])
return 'registered'
