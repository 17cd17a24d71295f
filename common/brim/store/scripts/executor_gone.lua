-- A model executor's process is gone, and its items have been put back: its reservation ends.
-- KEYS  1 executor  2 executors  3 book  4 availability  5 changed  6 wake  7 residency  8.. broker keys of its queue
-- ARGV  1 executor id  2 reason JSON
-- Returns  1 | 0 items are left (lose them first), or it is gone already

for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(field, 1, 2) == 'i:' then return 0 end
end
if redis.call('DEL', KEYS[1]) == 0 then return 0 end
redis.call('SREM', KEYS[2], ARGV[1])
local book = read_book(KEYS[3])
drop_resident(book, ARGV[1])
for i = 8, #KEYS do redis.call('DEL', KEYS[i]) end
reside(KEYS[7], ARGV[1], 'gone', because(ARGV[2]))
show(book, KEYS[4], KEYS[5], KEYS[6])
changed(KEYS[5], KEYS[6], 'x:' .. ARGV[1])
return 1
