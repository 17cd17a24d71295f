-- A dead process no longer counts in its device's book.
-- KEYS  1 book  2 availability  3 changed  4 wake
-- ARGV  1 proc
-- Returns  1 | 0 an attempt or a model executor is still bound to it: end that first

local book = read_book(KEYS[1])
for _, holders in ipairs({ book.attempts, book.residents }) do
  for _, holder in pairs(holders) do
    if holder.proc == ARGV[1] then return 0 end
  end
end
drop_process(book, ARGV[1])
show(book, KEYS[2], KEYS[3], KEYS[4])
return 1
