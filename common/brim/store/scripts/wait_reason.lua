-- Notes why the heads of lanes wait.
-- KEYS  1 leader  2.. records
-- ARGV  1 epoch  2.. reason JSON of each
-- Returns  how many of them still waited | -1 fenced

if fenced(KEYS[1], ARGV[1]) then return -1 end
local noted = 0
for i = 2, #KEYS do
  if redis.call('HGET', KEYS[i], 'state') == 'waiting' then
    redis.call('HSET', KEYS[i], 'reason', ARGV[i])
    noted = noted + 1
  end
end
return noted
