-- A node agent announces its node and devices. It has made sure before that nothing of an earlier boot runs.
-- KEYS  1 node  2 nodes  3 availability  4 changed  5 wake  6 taskset  7 signatures  8.. books, as in ARGV
-- ARGV  1 node  2 boot  3 JSON {labels, cpus, ram_mib, devices: [info...]}  4 task names, JSON list
--       5 signatures, JSON {name: text}  6 state that the devices begin in
-- Returns  "registered" | "attempts" (attempts of an earlier boot are still in the books: end them first)

local node = cjson.decode(ARGV[3])
for i = 8, #KEYS do
  if next(read_book(KEYS[i]).attempts) then return 'attempts' end
end
for i, info in ipairs(node.devices) do
  local key = KEYS[i + 7]
  redis.call('DEL', key)
  redis.call('HSET', key, 'info', cjson.encode(info), 'state', ARGV[6], 'external', '0')
  refresh(key, KEYS[3], KEYS[4], KEYS[5])
end
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'boot', ARGV[2], 'state', 'up', 'renewed_ms', integer(now_ms()), 'info', ARGV[3])
for _, name in ipairs(cjson.decode(ARGV[4])) do redis.call('SADD', KEYS[6], name) end
for name, signature in pairs(cjson.decode(ARGV[5])) do redis.call('HSET', KEYS[7], name, signature) end
changed(KEYS[4], KEYS[5], 'n:' .. ARGV[1])
return 'registered'
