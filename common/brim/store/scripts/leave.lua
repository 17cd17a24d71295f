-- A drained node takes itself out of the table.
-- KEYS  1 node  2 nodes  3 availability  4 changed  5 wake  6.. books, as ARGV 3..
-- ARGV  1 node  2 boot  3.. device uuids
-- Returns  1 | 0 refused: another boot took over, or attempts or model executors are still in the books

if redis.call('HGET', KEYS[1], 'boot') ~= ARGV[2] then return 0 end
for i = 6, #KEYS do
  local book = is_of(KEYS[i], ARGV[1]) and read_book(KEYS[i])
  if book and (next(book.attempts) or next(book.residents)) then return 0 end
end
for i = 6, #KEYS do
  if is_of(KEYS[i], ARGV[1]) then
    redis.call('DEL', KEYS[i])
    redis.call('HDEL', KEYS[3], ARGV[i - 3])
    changed(KEYS[4], KEYS[5], 'd:' .. ARGV[i - 3])
  end
end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
changed(KEYS[4], KEYS[5], 'n:' .. ARGV[1])
return 1
