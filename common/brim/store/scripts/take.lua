-- Takes what has changed since the last call, as it is now: "d:<uuid>" for devices, "l:<lane>" for lanes, "n:<node>" for
-- nodes, "x:<executor>" for model executors.
-- KEYS  1 leader  2 changed  3 wake  4 availability  5 lanes
-- ARGV  1 epoch  2 largest number of members  3 how many tasks of a lane
--       4 what lanes' keys begin with  5 nodes'  6 executors'  7.. fields of a node
-- Returns  {server ms, member, what is there, member, what is there, ...} | {} when fenced
--   what is there  of a device its entry, of a lane {what its tasks have in common, {id, order, ...}, depth}, of a node
--                  its fields, of a model executor all fields and values

if fenced(KEYS[1], ARGV[1]) then return {} end
local found = { integer(now_ms()) }
for _, member in ipairs(redis.call('SPOP', KEYS[2], ARGV[2])) do
  local kind, name, there = string.sub(member, 1, 1), string.sub(member, 3), nil
  if kind == 'd' then
    there = redis.call('HGET', KEYS[4], name)
  elseif kind == 'l' then
    local lane = ARGV[4] .. name
    there = { redis.call('HGET', KEYS[5], name), redis.call('ZRANGE', lane, 0, ARGV[3] - 1, 'WITHSCORES'),
              redis.call('ZCARD', lane) }
  elseif kind == 'n' then
    there = redis.call('HMGET', ARGV[5] .. name, unpack(ARGV, 7))
  else
    there = redis.call('HGETALL', ARGV[6] .. name)
  end
  found[#found + 1], found[#found + 2] = member, there
end
if redis.call('EXISTS', KEYS[2]) == 1 then rouse(KEYS[3]) end
return found
