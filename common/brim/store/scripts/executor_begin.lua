-- The process of a model executor says who it is, before it loads its model: from here on it holds the reservation.
-- KEYS  1 executor  2 book  3 availability  4 changed  5 wake
-- ARGV  1 executor id  2 worker boot  3 proc
-- Returns  1 | 0 it is not wanted (any more), or has begun in another process

local known = redis.call('HMGET', KEYS[1], 'state', 'boot')
local book = read_book(KEYS[2])
local held = book.residents[ARGV[1]]
if known[1] ~= 'starting' or not held or (known[2] and known[2] ~= ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], 'boot', ARGV[2], 'proc', ARGV[3])
bind_holder(book, held, ARGV[3])
put_resident(book, ARGV[1])
show(book, KEYS[3], KEYS[4], KEYS[5])
return 1
