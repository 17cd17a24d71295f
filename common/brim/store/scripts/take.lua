-- Takes what has changed since the last call: "d:<uuid>" for devices, "l:<lane>" for lanes, "n:<node>" for nodes,
-- "x:<executor>" for model executors.
-- KEYS  1 leader  2 changed  3 wake
-- ARGV  1 epoch  2 largest number of members
-- Returns  {server ms, member...} | {} when fenced

if fenced(KEYS[1], ARGV[1]) then return {} end
local members = redis.call('SPOP', KEYS[2], ARGV[2])
if redis.call('EXISTS', KEYS[2]) == 1 then rouse(KEYS[3]) end
table.insert(members, 1, integer(now_ms()))
return members
