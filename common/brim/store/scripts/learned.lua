-- Keeps what the active placement's learner has learned, and takes what it learned from off the list.
-- KEYS  1 leader  2 peaks  3 calibration  4 its version
-- ARGV  1 epoch  2 how many peaks, the oldest ones,  3.. profile, its state, profile, its state, ...
-- Returns  1 | -1 fenced; nothing was done

if fenced(KEYS[1], ARGV[1]) then return -1 end
redis.call('LTRIM', KEYS[2], tonumber(ARGV[2]), -1)
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
if #ARGV > 2 then redis.call('INCR', KEYS[4]) end
return 1
