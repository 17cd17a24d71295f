-- Marks idle executor processes of a device for replacement until the leftover of those marked covers what is short.
-- KEYS  1 leader  2 book  3 availability  4 changed  5 wake
-- ARGV  1 epoch  2 MiB wanted
-- Returns  number of processes marked | -1 fenced

if fenced(KEYS[1], ARGV[1]) then return -1 end
local book = read_book(KEYS[2])
local idle, wanted = {}, tonumber(ARGV[2])
for proc, process in pairs(book.processes) do
  if process.reserved == 0 and held_mib(process) > 0 then
    -- What is marked already comes back soon.
    if process.doomed then wanted = wanted - held_mib(process) else idle[#idle + 1] = proc end
  end
end
table.sort(idle, function(a, b)
  local x, y = held_mib(book.processes[a]), held_mib(book.processes[b])
  if x ~= y then return x > y end
  return a < b
end)
local marked = 0
for _, proc in ipairs(idle) do
  if wanted <= 0 then break end
  local process = book.processes[proc]
  weigh(book, process, -1)
  process.doomed = true
  weigh(book, process, 1)
  wanted, marked = wanted - held_mib(process), marked + 1
end
if marked > 0 then show(book, KEYS[3], KEYS[4], KEYS[5]) end
return marked
