-- Sets the state of some devices of a node: draining, starting, quarantined, lost, or up again.
-- KEYS  1 node  2 availability  3 changed  4 wake  5.. books
-- ARGV  1 boot of the node whose word this is  2 state
-- Returns  1 | 0 refused: another boot took over, or the node was declared lost

local known = redis.call('HMGET', KEYS[1], 'boot', 'state')
if known[1] ~= ARGV[1] or known[2] == 'lost' then return 0 end
for i = 5, #KEYS do
  local book = read_book(KEYS[i])
  set_state(book, ARGV[2])
  show(book, KEYS[2], KEYS[3], KEYS[4])
end
return 1
