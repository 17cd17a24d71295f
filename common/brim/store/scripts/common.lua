-- Shared by the scripts: of these blocks, which empty lines part, those that a script uses (and what they use in turn)
-- are put in front of it when it is loaded, in this order. A block that defines nothing is only for people.
--
-- Record    HASH  one task; its fields are listed in docs/redis-keys.md.
-- Book      HASH  one device:
--   info          JSON  what does not change between registrations (uuid, node, index, model, ...)
--   state         up | draining | lost | starting | quarantined
--   external      MiB used by processes that brim did not start
--   sampled_ms    server time of the latest report that counted
--   a:<attempt>   "<vram MiB>|<thousandths of a host CPU>|<host RAM MiB>|<proc or nothing>|<task id>"
--                 an attempt that holds an executor here; the host's part stands with its first device
--   whole         the attempt that has the device to itself, if one has: it holds all that can be given away
--   x:<executor>  "<vram MiB>|<proc or nothing>": a model executor's reservation, for as long as it lives
--   p:<proc>      "<measured MiB or -1>|<floor MiB>|<context MiB>|<last end ms>|<doomed 0/1>|<reserved MiB>"
--   entry         JSON  the device's entry in the availability table: the sums of the book, kept by differences, so that
--                 a transition need not read all of it
-- A process counts as max(what is reserved for what is bound to it, measured; unknown: its floor).
-- Executor  HASH  one model executor, the book of its items; its fields are listed in docs/redis-keys.md:
--   id            its own name: whoever has a book and finds this knows that it is an executor's
--   i:<attempt>   an item that it holds: "1" once sealed, "0" before, and JSON; items hold no memory of their own

local LIVE = { placed = true, claimed = true, running = true, finishing = true }

-- States in which brim itself has answered the producer: nothing runs under this id any more.
local ANSWERED = { cancelled = true, expired = true, dead = true }

local TERMINAL = { succeeded = true, failed = true, cancelled = true, expired = true, dead = true }

local STORY_LENGTH = 200

local RESIDENCY_LENGTH = 2000

-- The latest peaks that are kept while nobody learns from them.
local LATEST_PEAKS = 10000

local PRIORITY_STEP = 2 ^ 47

-- Batched tasks age: a step of priority is worth ten seconds of waiting (brim.core.batching.PRIORITY_STEP_S).
local AGEING_STEP = 10 * 100000

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function integer(number)
  return string.format('%d', number)
end

-- One line of a task's story; `more` is a JSON fragment that starts with a comma, or nothing.
local function tell(story, now, event, more)
  local line = '{"t":' .. integer(now) .. ',"event":"' .. event .. '"' .. (more or '') .. '}'
  if redis.call('RPUSH', story, line) > STORY_LENGTH then
    redis.call('LTRIM', story, -STORY_LENGTH, -1)
  end
end

local function because(reason)
  if not reason or reason == '' then return '' end
  return ',"reason":' .. reason
end

-- One line about a model executor's life, for people and for the check of what was reserved when; `more` as above.
local function reside(residency, executor, event, more)
  redis.call('RPUSH', residency, '{"t":' .. integer(now_ms()) .. ',"executor":' .. cjson.encode(executor) .. ',"event":"'
    .. event .. '"' .. (more or '') .. '}')
  redis.call('LTRIM', residency, -RESIDENCY_LENGTH, -1)
end

-- Keeps the counts of a task that goes from one state (nil: it is new) to another.
local function count(counts, from, to)
  if from then redis.call('HINCRBY', counts, from, -1) end
  redis.call('HINCRBY', counts, to, 1)
end

-- Moves a task from one state to another, with further fields and values of its record, and keeps the counts.
local function move(record, counts, from, to, ...)
  redis.call('HSET', record, 'state', to, ...)
  count(counts, from, to)
end

-- An attempt that waits for its worker has been taken by this boot of it, and goes on to a state, with further fields.
local function take_placed(record, story, counts, now, attempt, boot, to, ...)
  move(record, counts, 'placed', to, 'boot', boot, 'claimed_ms', integer(now), ...)
  tell(story, now, 'claimed', ',"attempt":"' .. attempt .. '"')
end

-- Wakes placement; the list is a semaphore of at most one.
local function rouse(wake)
  if redis.call('LLEN', wake) == 0 then redis.call('LPUSH', wake, '1') end
end

-- Tells placement that something it mirrors has changed.
local function changed(changes, wake, member)
  redis.call('SADD', changes, member)
  rouse(wake)
end

-- A task's place in overflow: by priority (0 first), then by the tick of its admission; a batched one's by the tick,
-- with priority as a head start.
local function overflow_order(priority, tick, batch)
  if batch ~= '' then return integer(tick + tonumber(priority) * AGEING_STEP) end
  return integer(tonumber(priority) * PRIORITY_STEP + tick)
end

-- What the tasks of a lane have in common, as JSON; `batch` is JSON or nothing.
local function in_common(task, demand, context_mib, batch)
  return '{"task":' .. cjson.encode(task) .. ',"demand":' .. demand .. ',"context_mib":' .. context_mib
    .. (batch and batch ~= '' and ',"batch":' .. batch or '') .. '}'
end

-- Puts a waiting task into its lane. `lanes` keeps what every task of the lane has in common.
local function enqueue(record, lane_key, lanes, changes, wake, id)
  local fields = redis.call('HMGET', record, 'lane', 'order', 'task', 'demand', 'context_mib', 'batch')
  redis.call('ZADD', lane_key, fields[2], id)
  redis.call('HSET', lanes, fields[1], in_common(fields[3], fields[4], fields[5], fields[6]))
  changed(changes, wake, 'l:' .. fields[1])
end

local function parse_process(value)
  local measured, floor, context, ended, doomed, reserved =
    string.match(value, '^(-?%d+)|(%d+)|(%d+)|(%d+)|(%d)|?(%d*)$')
  return { measured = tonumber(measured), floor = tonumber(floor), context = tonumber(context),
           ended = tonumber(ended), doomed = doomed == '1', reserved = tonumber(reserved) or 0, text = value }
end

local function format_process(process)
  return string.format('%d|%d|%d|%.0f|%d|%d', process.measured, process.floor, process.context, process.ended,
    process.doomed and 1 or 0, process.reserved)
end

-- What an attempt holds of a device, as it stands in the book.
local HELD = '%d|%d|%d|%s|%s'

local function parse_attempt(value)
  local vram, milli_cpus, ram, proc, id = string.match(value, '^(%d+)|(%d+)|(%d+)|([^|]*)|(.*)$')
  return { vram = tonumber(vram), milli_cpus = tonumber(milli_cpus), ram = tonumber(ram), proc = proc, id = id }
end

local function fresh_process()
  return { measured = -1, floor = 0, context = 0, ended = 0, doomed = false, reserved = 0 }
end

-- What a process holds apart from reservations of attempts bound to it.
local function held_mib(process)
  return process.measured >= 0 and process.measured or process.floor
end

-- Puts a process into a book's sums (`sign` 1), or takes it out (-1). Whatever changes it stands between the two.
local function weigh(book, process, sign)
  local held = held_mib(process)
  book.committed = book.committed + sign * math.max(process.reserved, held)
  if process.reserved == 0 and not process.doomed then book.reclaimable = book.reclaimable + sign * held end
end

-- A process of a book, which may have no entry yet.
local function process_of(book, proc)
  if not book.processes[proc] then
    local text = redis.call('HGET', book.key, 'p:' .. proc)
    book.processes[proc] = text and parse_process(text) or fresh_process()
  end
  return book.processes[proc]
end

-- The same as `weigh` for the memory of an attempt or model executor: its process's, or its own while it has none.
local function weigh_holder(book, holder, sign)
  if holder.proc == '' then
    book.committed = book.committed + sign * holder.vram
    return
  end
  local process = process_of(book, holder.proc)
  weigh(book, process, -1)
  process.reserved = process.reserved + sign * holder.vram
  weigh(book, process, 1)
end

-- From here on a process holds what an attempt or model executor has reserved.
local function bind_holder(book, holder, proc)
  weigh_holder(book, holder, -1)
  holder.proc = proc
  weigh_holder(book, holder, 1)
end

-- Puts all that an attempt holds into a book's sums, or takes it out.
local function weigh_attempt(book, held, sign)
  book.busy, book.milli_cpus = book.busy + sign, book.milli_cpus + sign * held.milli_cpus
  book.ram = book.ram + sign * held.ram
  weigh_holder(book, held, sign)
end

-- What an entry in the availability table says, and the part of it that does not change.
local ENTRY = '{"state":"%s","external_mib":%d,"committed_mib":%d,"busy":%d,"reclaimable_mib":%d,"cpus_used":%.3f,'
  .. '"ram_used_mib":%d,"total_mib":%d,"headroom_mib":%d,"executors":%d,"uuid":%s'

local PARSED_ENTRY = '^{"state":"(%a+)","external_mib":(%d+),"committed_mib":(%d+),"busy":(%d+),"reclaimable_mib":(%d+),'
  .. '"cpus_used":([%d.]+),"ram_used_mib":(%d+),"total_mib":(%d+),"headroom_mib":(%d+),"executors":(%d+),"uuid":("([^"]+)".*)$'

-- Reads all of a device's book: attempts, model executors and processes, from which it is summed up anew. A model
-- executor's own book is only named: nothing in it is memory.
local function read_book(key)
  local book = { key = key, attempts = {}, residents = {}, processes = {}, external = 0, sampled_ms = 0,
                 committed = 0, reclaimable = 0, busy = 0, milli_cpus = 0, ram = 0 }
  local flat = redis.call('HGETALL', key)
  for i = 1, #flat, 2 do
    local field, value = flat[i], flat[i + 1]
    local kind = string.sub(field, 1, 2)
    if kind == 'a:' then
      book.attempts[string.sub(field, 3)] = parse_attempt(value)
    elseif kind == 'x:' then
      local vram, proc = string.match(value, '^(%d+)|(.*)$')
      book.residents[string.sub(field, 3)] = { vram = tonumber(vram), proc = proc }
    elseif kind == 'p:' then
      book.processes[string.sub(field, 3)] = parse_process(value)
    elseif field == 'info' then
      local info = cjson.decode(value)
      book.total, book.headroom, book.executors = info.total_mib, info.headroom_mib, info.executors
      book.device = info.uuid
      book.fixed = string.format('%s,"node":%s,"index":%d,"model":%s,"tasks":%s}', cjson.encode(info.uuid),
        cjson.encode(info.node), info.index, cjson.encode(info.model), cjson.encode(info.tasks))
    elseif field == 'id' then
      book.executor = value
    elseif field == 'state' or field == 'whole' or field == 'entry' then
      book[field] = value
    elseif field == 'external' or field == 'sampled_ms' then
      book[field] = tonumber(value)
    end
  end
  for _, process in pairs(book.processes) do
    process.reserved = 0
    weigh(book, process, 1)
  end
  for _, held in pairs(book.attempts) do weigh_attempt(book, held, 1) end
  for _, held in pairs(book.residents) do weigh_holder(book, held, 1) end
  return book
end

-- A book as its entry sums it up.
local function entry_book(key, entry, attempts, processes)
  local state, external, committed, busy, reclaimable, cpus, ram, total, headroom, executors, fixed, device =
    string.match(entry, PARSED_ENTRY)
  if string.find(device, '\\', 1, true) then device = string.gsub(device, '\\(.)', '%1') end
  return { key = key, entry = entry, state = state, external = tonumber(external), committed = tonumber(committed),
           busy = tonumber(busy), reclaimable = tonumber(reclaimable), milli_cpus = math.floor(cpus * 1000 + 0.5),
           ram = tonumber(ram), total = tonumber(total), headroom = tonumber(headroom), executors = tonumber(executors),
           fixed = fixed, device = device, attempts = attempts, processes = processes }
end

-- Opens a book, if wanted at one attempt and the process that it is bound to, or is to be bound to ('' none): what a
-- transition needs costs the same, however much else stands there. What an attempt alone on its device holds besides
-- does not stand in the entry; that book is read as a whole.
local function open_book(key, attempt, proc)
  local fields = attempt and redis.call('HMGET', key, 'entry', 'whole', 'id', 'a:' .. attempt, 'p:' .. proc)
    or redis.call('HMGET', key, 'entry', 'whole', 'id')
  local entry = fields[1]
  if fields[3] then return { key = key, executor = fields[3], attempts = {}, processes = {} } end
  if fields[2] or not entry then return read_book(key) end
  return entry_book(key, entry, fields[4] and { [attempt] = parse_attempt(fields[4]) } or {},
    fields[5] and { [proc] = parse_process(fields[5]) } or {})
end

-- Notes a field of a book that is to be written, or to be cut out, when the book is saved.
local function put(book, field, value)
  local set = book.set
  if set then
    set[#set + 1] = field
    set[#set + 1] = value
  else
    book.set = { field, value }
  end
end

local function cut(book, field)
  book.cut = book.cut or {}
  book.cut[#book.cut + 1] = field
end

-- Notes one attempt or model executor of a book.
local function put_attempt(book, attempt)
  local held = book.attempts[attempt]
  put(book, 'a:' .. attempt, string.format(HELD, held.vram, held.milli_cpus, held.ram, held.proc, held.id))
end

local function put_resident(book, executor)
  local held = book.residents[executor]
  put(book, 'x:' .. executor, string.format('%d|%s', held.vram, held.proc))
end

local function drop_resident(book, executor)
  local held = book.residents[executor]
  if not held then return end
  weigh_holder(book, held, -1)
  book.residents[executor] = nil
  cut(book, 'x:' .. executor)
end

local function drop_process(book, proc)
  local process = book.processes[proc]
  if not process then return end
  weigh(book, process, -1)
  book.processes[proc] = nil
  cut(book, 'p:' .. proc)
end

-- Sets the state that a device is in.
local function set_state(book, state)
  book.state = state
  put(book, 'state', state)
end

-- Whether a device is one of this node's; another node may have registered it since, or it may be gone.
local function is_of(key, node)
  local info = redis.call('HGET', key, 'info')
  return info and cjson.decode(info).node == node
end

-- What is committed of a device: an attempt that has it to itself holds all that can be given away.
local function committed_mib(book)
  if not book.whole then return book.committed end
  return math.max(book.committed, book.total - book.headroom - book.external)
end

-- Writes what has changed in a book, and the device's entry in the availability table, unless the caller does so (nil).
-- Returns the device if that is another entry now.
local function save(book, availability)
  if not book.fixed then return nil end
  for proc, process in pairs(book.processes) do
    local text = format_process(process)
    if text ~= process.text then
      process.text = text
      put(book, 'p:' .. proc, text)
    end
  end
  local entry = string.format(ENTRY, book.state, book.external, committed_mib(book), book.busy, book.reclaimable,
    book.milli_cpus / 1000, book.ram, book.total, book.headroom, book.executors, book.fixed)
  local device = nil
  if entry ~= book.entry then
    book.entry, device = entry, book.device
    put(book, 'entry', entry)
    if availability then redis.call('HSET', availability, device, entry) end
  end
  if book.cut then redis.call('HDEL', book.key, unpack(book.cut)) end
  if book.set then redis.call('HSET', book.key, unpack(book.set)) end
  book.set, book.cut = nil, nil
  return device
end

-- Saves a book, and tells placement if the device's entry has changed; of a model executor's book, tells it that it
-- has changed.
local function show(book, availability, changes, wake)
  if book.executor then return changed(changes, wake, 'x:' .. book.executor) end
  local device = save(book, availability)
  if device then changed(changes, wake, 'd:' .. device) end
end

-- Takes an attempt out of a device's book. Its process then counts as its `leftover`; where that is not known, as
-- what it counted for before, until it is measured after now, or gone. An item just leaves its model executor's book.
local function release(book, attempt, leftover, context, now)
  if book.executor then return redis.call('HDEL', book.key, 'i:' .. attempt) end
  local held = book.attempts[attempt]
  if not held then return end
  local process = held.proc ~= '' and process_of(book, held.proc)
  local counted = process and math.max(process.reserved, held_mib(process))
  weigh_attempt(book, held, -1)
  book.attempts[attempt] = nil
  cut(book, 'a:' .. attempt)
  if book.whole == attempt then
    book.whole = nil
    cut(book, 'whole')
  end
  if not process then return end
  weigh(book, process, -1)
  if leftover then
    process.measured, process.floor = leftover, 0
  else
    process.measured, process.floor = -1, counted
  end
  process.context, process.ended = context, now
  weigh(book, process, 1)
end

-- The peak of an attempt that is over: what the frameworks in its process `counted`, or nothing (''): then the agent's
-- samples have the word, and where they have not seen it either it stays unknown (nil).
local function peak_of(counted, sampled)
  return counted ~= '' and counted or sampled or nil
end

-- Notes the peak of an attempt that is over for calibration, which learns from it (see brim.store.calibration).
-- `estimate`: how its demand was worked out, JSON, if that is known.
local function note_peak(peaks, id, attempt, book, peak, estimate, ran_out)
  local held = book.attempts[attempt]
  if not (peak and estimate and held) then return end
  local line = '{"task_id":' .. cjson.encode(id) .. ',"gpu_model":' .. string.match(book.fixed, '"model":(.-),"tasks":')
    .. ',"reserved_mib":' .. integer(held.vram) .. ',"peak_mib":' .. peak .. ',"out_of_memory":'
    .. tostring(ran_out) .. ',"estimate":' .. estimate .. '}'
  if redis.call('RPUSH', peaks, line) > LATEST_PEAKS then redis.call('LTRIM', peaks, -LATEST_PEAKS, -1) end
end

-- A peak as a JSON fragment for the story.
local function peaked(peak)
  return peak and ',"peak_mib":' .. peak or ''
end

-- The fencing check (invariant 4): true unless `epoch` is the active placement's.
local function fenced(leader, epoch)
  return redis.call('HGET', leader, 'epoch') ~= epoch
end

-- Whether one run of an id comes after another: replacements count first, then retries.
local function later(nesting, retries, than_nesting, than_retries)
  return nesting > than_nesting or (nesting == than_nesting and retries > than_retries)
end

-- Leaves a task to its next run. Where that run's message is held already, it goes back to its broker list, the
-- first in turn there.
local function hand_over(record, awaited, expiring, id, now)
  local held = redis.call('HMGET', record, 'next', 'next_list')
  if held[1] then redis.call('RPUSH', held[2], held[1]) end
  redis.call('HDEL', record, 'next', 'next_list', 'next_nesting', 'next_retries')
  redis.call('ZADD', awaited, integer(now), id)
  redis.call('ZREM', expiring, id)
end

-- Closes a task: no newer run is held any more, and the envelope goes unless an answer or a later retry still needs it.
-- `expires`: the record's `expires_ms`; only with one can it be listed to expire.
local function close(record, finished, expiring, id, now, keep_envelope, expires)
  if keep_envelope then
    redis.call('HDEL', record, 'next', 'next_list', 'next_nesting', 'next_retries')
  else
    redis.call('HDEL', record, 'next', 'next_list', 'next_nesting', 'next_retries', 'head', 'tail')
  end
  redis.call('ZADD', finished, integer(now), id)
  if expires and expires ~= '' then redis.call('ZREM', expiring, id) end
end

-- Notes an answer that brim itself has to give; the record stays until it is given.
local function owe_answer(outbox, record, id, state, reason)
  redis.call('RPUSH', outbox, '{"id":' .. cjson.encode(id) .. ',"state":"' .. state .. '"' .. because(reason) .. '}')
  redis.call('HSET', record, 'owed', '1')
end

