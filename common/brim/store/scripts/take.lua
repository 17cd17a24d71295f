-- Takes what has changed since the last call: "d:<uuid>" for devices, "l:<lane>" for lanes, "n:<node>" for nodes,
-- "x:<executor>" for model executors.
-- KEYS  1 leader  2 changed  3 wake  4 availability
-- ARGV  1 epoch  2 largest number of members
-- Returns  {server ms, member, entry, member, entry, ...} | {} when fenced
--   entry  a device's in the availability table, false where it has none, as for everything else

if fenced(KEYS[1], ARGV[1]) then return {} end
local found = { integer(now_ms()) }
for _, member in ipairs(redis.call('SPOP', KEYS[2], ARGV[2])) do
  local uuid = string.match(member, '^d:(.*)')
  found[#found + 1], found[#found + 2] = member, uuid and redis.call('HGET', KEYS[4], uuid) or false
end
if redis.call('EXISTS', KEYS[2]) == 1 then rouse(KEYS[3]) end
return found
