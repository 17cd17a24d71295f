-- Shared by every script: this text is put in front of each of them when they are loaded.
--
-- Record    HASH  one task; its fields are listed in docs/redis-keys.md.
-- Book      HASH  one device:
--   info          JSON  what does not change between registrations (uuid, node, index, model, ...)
--   state         up | draining | lost | quarantined
--   external      MiB used by processes that brim did not start
--   sampled_ms    server time of the latest report that counted
--   a:<attempt>   "<vram MiB>|<thousandths of a host CPU>|<host RAM MiB>|<proc or nothing>|<task id>"
--                 an attempt that holds an executor here; the host's part stands with its first device
--   whole         the attempt that has the device to itself, if one has: it holds all that can be given away
--   x:<executor>  "<vram MiB>|<proc or nothing>": a model executor's reservation, for as long as it lives
--   p:<proc>      "<measured MiB or -1>|<floor MiB>|<context MiB>|<last end ms>|<doomed 0/1>"
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
  return string.format('%.0f', number)
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

-- Moves a task from one state to another and keeps the counts.
local function move(record, counts, from, to)
  redis.call('HSET', record, 'state', to)
  if from then redis.call('HINCRBY', counts, from, -1) end
  redis.call('HINCRBY', counts, to, 1)
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

-- Puts a waiting task into its lane. `lanes` keeps what every task of the lane has in common.
local function enqueue(record, lane_key, lanes, changes, wake, id)
  local fields = redis.call('HMGET', record, 'lane', 'order', 'task', 'demand', 'context_mib', 'batch')
  redis.call('ZADD', lane_key, fields[2], id)
  redis.call('HSET', lanes, fields[1], '{"task":' .. cjson.encode(fields[3]) .. ',"demand":' .. fields[4]
    .. ',"context_mib":' .. fields[5] .. (fields[6] and ',"batch":' .. fields[6] or '') .. '}')
  changed(changes, wake, 'l:' .. fields[1])
end

local function parse_process(value)
  local measured, floor, context, ended, doomed = string.match(value, '^(-?%d+)|(%d+)|(%d+)|(%d+)|(%d)$')
  return { measured = tonumber(measured), floor = tonumber(floor), context = tonumber(context),
           ended = tonumber(ended), doomed = doomed == '1', reserved = 0 }
end

local function format_process(process)
  return integer(process.measured) .. '|' .. integer(process.floor) .. '|' .. integer(process.context)
    .. '|' .. integer(process.ended) .. '|' .. (process.doomed and '1' or '0')
end

local function fresh_process()
  return { measured = -1, floor = 0, context = 0, ended = 0, doomed = false, reserved = 0 }
end

-- What a process holds apart from reservations of attempts bound to it.
local function held_mib(process)
  return process.measured >= 0 and process.measured or process.floor
end

-- Sums a book up: what is committed, what of it idle processes would give back, and what attempts hold besides.
local function add_up(book)
  local committed, reclaimable, busy, milli_cpus, ram = 0, 0, 0, 0, 0
  for _, process in pairs(book.processes) do process.reserved = 0 end
  for _, attempt in pairs(book.attempts) do
    busy, milli_cpus, ram = busy + 1, milli_cpus + attempt.milli_cpus, ram + attempt.ram
  end
  for _, holders in ipairs({ book.attempts, book.residents }) do
    for _, holder in pairs(holders) do
      if holder.proc == '' then
        committed = committed + holder.vram
      else
        local process = book.processes[holder.proc] or fresh_process()
        process.reserved = process.reserved + holder.vram
        book.processes[holder.proc] = process
      end
    end
  end
  for _, process in pairs(book.processes) do
    committed = committed + math.max(process.reserved, held_mib(process))
    if process.reserved == 0 and not process.doomed then reclaimable = reclaimable + held_mib(process) end
  end
  if book.whole then committed = math.max(committed, book.info.total_mib - book.info.headroom_mib - book.external) end
  book.committed, book.reclaimable, book.busy = committed, reclaimable, busy
  book.milli_cpus, book.ram = milli_cpus, ram
end

-- Reads a device's book: attempts, model executors and processes with what is reserved for them, and the sums. A model
-- executor's own book is only named: nothing in it is memory.
local function read_book(key)
  local book = { key = key, attempts = {}, residents = {}, processes = {}, external = 0, sampled_ms = 0 }
  book.executor = redis.call('HGET', key, 'id') or nil
  if book.executor then return book end
  local flat = redis.call('HGETALL', key)
  for i = 1, #flat, 2 do
    local field, value = flat[i], flat[i + 1]
    local kind = string.sub(field, 1, 2)
    if kind == 'a:' then
      local vram, milli_cpus, ram, proc, id = string.match(value, '^(%d+)|(%d+)|(%d+)|([^|]*)|(.*)$')
      book.attempts[string.sub(field, 3)] = { vram = tonumber(vram), milli_cpus = tonumber(milli_cpus),
                                              ram = tonumber(ram), proc = proc, id = id }
    elseif kind == 'x:' then
      local vram, proc = string.match(value, '^(%d+)|(.*)$')
      book.residents[string.sub(field, 3)] = { vram = tonumber(vram), proc = proc }
    elseif kind == 'p:' then
      book.processes[string.sub(field, 3)] = parse_process(value)
    elseif field == 'info' then
      book.info = cjson.decode(value)
    elseif field == 'state' or field == 'whole' then
      book[field] = value
    else
      book[field] = tonumber(value)
    end
  end
  add_up(book)
  return book
end

-- Writes one attempt, model executor or process of a book.
local function write_attempt(book, attempt)
  local held = book.attempts[attempt]
  redis.call('HSET', book.key, 'a:' .. attempt, integer(held.vram) .. '|' .. integer(held.milli_cpus) .. '|'
    .. integer(held.ram) .. '|' .. held.proc .. '|' .. held.id)
end

local function write_resident(book, executor)
  local held = book.residents[executor]
  redis.call('HSET', book.key, 'x:' .. executor, integer(held.vram) .. '|' .. held.proc)
end

local function write_process(book, proc)
  redis.call('HSET', book.key, 'p:' .. proc, format_process(book.processes[proc]))
end

-- Whether a device is one of this node's; another node may have registered it since, or it may be gone.
local function is_of(key, node)
  local info = redis.call('HGET', key, 'info')
  return info and cjson.decode(info).node == node
end

-- Rewrites the device's entry in the availability table from its book, and tells placement if it changed; of a model
-- executor's book, tells it that it changed.
local function show(book, availability, changes, wake)
  if book.executor then return changed(changes, wake, 'x:' .. book.executor) end
  if not book.info then return end
  add_up(book)
  local info = book.info
  local entry = cjson.encode({
    uuid = info.uuid, node = info.node, index = info.index, model = info.model, total_mib = info.total_mib,
    headroom_mib = info.headroom_mib, executors = info.executors, tasks = info.tasks, state = book.state,
    external_mib = book.external, committed_mib = book.committed, busy = book.busy,
    reclaimable_mib = book.reclaimable, cpus_used = book.milli_cpus / 1000, ram_used_mib = book.ram })
  if redis.call('HGET', availability, info.uuid) ~= entry then
    redis.call('HSET', availability, info.uuid, entry)
    changed(changes, wake, 'd:' .. info.uuid)
  end
end

-- Takes an attempt out of a device's book. Its process then counts as its `leftover`; where that is not known, as
-- what it counted for before, until it is measured after now, or gone. An item just leaves its model executor's book.
local function release(book, attempt, leftover, context, now)
  if book.executor then return redis.call('HDEL', book.key, 'i:' .. attempt) end
  local held = book.attempts[attempt]
  if not held then return end
  book.attempts[attempt] = nil
  redis.call('HDEL', book.key, 'a:' .. attempt)
  if book.whole == attempt then
    book.whole = nil
    redis.call('HDEL', book.key, 'whole')
  end
  if held.proc == '' then return end
  local process = book.processes[held.proc]
  if leftover then
    process.measured, process.floor = leftover, 0
  else
    process.measured, process.floor = -1, math.max(process.reserved, held_mib(process))
  end
  process.context, process.ended = context, now
  write_process(book, held.proc)
end

-- Notes the peak of an attempt that is over: in its record, and for calibration, which learns from it (see
-- brim.store.calibration). `counted` is what the frameworks in its process counted, or nothing: then the agent's samples
-- have the word, and where they have not seen it either it stays unknown. Returns a JSON fragment for the story.
local function note_peak(record, peaks, id, attempt, book, counted, ran_out)
  local known = redis.call('HMGET', record, 'sampled_mib', 'estimate')
  local peak = counted ~= '' and counted or known[1]
  if not peak then return '' end
  redis.call('HSET', record, 'peak_mib', peak)
  local held = book.attempts[attempt]
  if known[2] and held then
    redis.call('RPUSH', peaks, '{"task_id":' .. cjson.encode(id) .. ',"gpu_model":' .. cjson.encode(book.info.model)
      .. ',"reserved_mib":' .. integer(held.vram) .. ',"peak_mib":' .. peak .. ',"out_of_memory":'
      .. tostring(ran_out) .. ',"estimate":' .. known[2] .. '}')
    redis.call('LTRIM', peaks, -LATEST_PEAKS, -1)
  end
  return ',"peak_mib":' .. peak
end

-- The fencing check (invariant 4): true unless `epoch` is the active placement's.
local function fenced(leader, epoch)
  return redis.call('HGET', leader, 'epoch') ~= epoch
end

-- Whether one run of an id comes after another: replacements count first, then retries.
local function later(nesting, retries, than_nesting, than_retries)
  return nesting > than_nesting or (nesting == than_nesting and retries > than_retries)
end

-- Forgets the message of a newer run that was held.
local function drop_next(record)
  redis.call('HDEL', record, 'next', 'next_list', 'next_nesting', 'next_retries')
end

-- Leaves a task to its next run. Where that run's message is held already, it goes back to its broker list, the
-- first in turn there.
local function hand_over(record, awaited, expiring, id, now)
  local held = redis.call('HMGET', record, 'next', 'next_list')
  if held[1] then redis.call('RPUSH', held[2], held[1]) end
  drop_next(record)
  redis.call('ZADD', awaited, integer(now), id)
  redis.call('ZREM', expiring, id)
end

-- Closes a task: the envelope goes unless an answer or a later retry still needs it.
local function close(record, finished, expiring, id, now, keep_envelope)
  redis.call('HSET', record, 'ended_ms', integer(now))
  drop_next(record)
  if not keep_envelope then redis.call('HDEL', record, 'head', 'tail') end
  redis.call('ZADD', finished, integer(now), id)
  redis.call('ZREM', expiring, id)
end

-- Notes an answer that brim itself has to give; the record stays until it is given.
local function owe_answer(outbox, record, id, state, reason)
  redis.call('RPUSH', outbox, '{"id":' .. cjson.encode(id) .. ',"state":"' .. state .. '"' .. because(reason) .. '}')
  redis.call('HSET', record, 'owed', '1')
end

