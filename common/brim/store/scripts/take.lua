-- Takes what has changed since the last call: "d:<uuid>" for devices, "l:<lane>" for lanes, "n:<node>" for nodes.
-- KEYS  1 leader  2 changed
-- ARGV  1 epoch  2 largest number of members
-- Returns  {server ms, member...} | {} when fenced

if fenced(KEYS[1], ARGV[1]) then return {} end
local members = redis.call('SPOP', KEYS[2], ARGV[2])
table.insert(members, 1, integer(now_ms()))
return members
