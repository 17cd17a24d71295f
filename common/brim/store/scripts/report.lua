-- Writes a memory report into the books and publishes it (requirement C: workers report memory over pub/sub).
-- Reports are absolute; a process's figure counts only if the process's last end is earlier than the sampling.
-- KEYS  1 node  2 availability  3 changed  4 wake  5 channel  6.. books, as ARGV 4..
-- ARGV  1 boot  2 sampled ms  3 the report as JSON  4.. device uuids
-- Returns  1 | 0 refused: another boot took over

if redis.call('HGET', KEYS[1], 'boot') ~= ARGV[1] then return 0 end
local sampled, report = tonumber(ARGV[2]), cjson.decode(ARGV[3])
for i = 4, #ARGV do
  local key, figures = KEYS[i + 2], report.devices[ARGV[i]]
  local book = read_book(key)
  if book.fixed and sampled >= book.sampled_ms then
    -- What others use lies between these two: a process that cannot be measured may use all that is reserved for it,
    -- or nothing beyond what it held before; what it held before its last end is not known any more.
    local least, most = figures.used_mib, figures.used_mib
    for proc, mib in pairs(figures.processes) do
      local process = book.processes[proc] or fresh_process()
      local counts = process.ended < sampled
      if counts then
        if book.processes[proc] then weigh(book, process, -1) end
        if mib ~= cjson.null then
          process.measured, process.floor = mib, 0
        elseif process.floor > 0 then
          process.floor = math.min(process.floor, process.context)
        end
        book.processes[proc] = process
        weigh(book, process, 1)
      end
      if mib == cjson.null then
        least = least - (counts and math.max(process.reserved, held_mib(process)) or figures.used_mib)
        most = most - held_mib(process)
      else
        least, most = least - mib, most - mib
      end
    end
    local external = math.max(0, least, math.min(book.external, most))
    if external ~= book.external then
      book.external = external
      put(book, 'external', integer(external))
    end
    put(book, 'sampled_ms', ARGV[2])
    show(book, KEYS[2], KEYS[3], KEYS[4])
  end
end
redis.call('PUBLISH', KEYS[5], ARGV[3])
return 1
