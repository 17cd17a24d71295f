-- Declares a node lost that has not renewed for too long, by the server's clock; its devices take nothing until
-- it has registered again (invariant 3).
-- KEYS  1 leader  2 node  3 availability  4 changed  5 wake  6.. books
-- ARGV  1 epoch  2 lease timeout ms  3 node
-- Returns  1 lost | 0 it lives, or was lost already | -1 fenced

if fenced(KEYS[1], ARGV[1]) then return -1 end
local known = redis.call('HMGET', KEYS[2], 'renewed_ms', 'state')
if not known[1] or known[2] == 'lost' or now_ms() - tonumber(known[1]) <= tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[2], 'state', 'lost')
for i = 6, #KEYS do
  if is_of(KEYS[i], ARGV[3]) then
    local book = read_book(KEYS[i])
    set_state(book, 'lost')
    show(book, KEYS[3], KEYS[4], KEYS[5])
  end
end
return 1
