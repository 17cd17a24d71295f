-- Takes what has changed since the last call: "d:<uuid>" for devices, "l:<lane>" for lanes, "n:<node>" for nodes,
-- "x:<executor>" for model executors.
-- KEYS  1 leader  2 changed  3 wake  4 availability  5 lanes  6 what every lane's key begins with
-- ARGV  1 epoch  2 largest number of members  3 how many tasks of a lane's beginning to read  4 of how many lanes at most
-- Returns  {server ms, member, what is found, member, what is found, ...} | {} when fenced
--   of a device  its entry in the availability table, false where it has none
--   of a lane    {what its tasks have in common, {id, order, id, order, ...}, how many wait}
--   of anything else, or of one lane too many, false

if fenced(KEYS[1], ARGV[1]) then return {} end
local found, lanes_left = { integer(now_ms()) }, tonumber(ARGV[4])
for _, member in ipairs(redis.call('SPOP', KEYS[2], ARGV[2])) do
  local kind, name, what = string.sub(member, 1, 2), string.sub(member, 3), false
  if kind == 'd:' then
    what = redis.call('HGET', KEYS[4], name)
  elseif kind == 'l:' and lanes_left > 0 then
    lanes_left = lanes_left - 1
    local lane = KEYS[6] .. name
    what = { redis.call('HGET', KEYS[5], name), redis.call('ZRANGE', lane, 0, ARGV[3] - 1, 'WITHSCORES'),
             redis.call('ZCARD', lane) }
  end
  found[#found + 1], found[#found + 2] = member, what
end
if redis.call('EXISTS', KEYS[2]) == 1 then rouse(KEYS[3]) end
return found
