-- Reads who shares locks, and how many wait in their queues. Changes nothing.
--
-- KEYS     of each lock  its members, leases and queue (see queue.lua)
--
-- Returns for each lock  how many wait in the queue
--                        a list of the values of the leases, each with its remaining time in ms; they count only while the lock is
--                        shared

local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local answers = {}
for i = 1, #KEYS, 3 do
  local tokens = redis.call('ZRANGEBYSCORE', KEYS[i], '(' .. now, '+inf', 'WITHSCORES')
  local found = {}
  for j = 1, #tokens, 2 do
    local lease = redis.call('HGET', KEYS[i + 1], tokens[j])
    if lease then
      found[#found + 1] = lease
      found[#found + 1] = tokens[j + 1] - now
    end
  end
  answers[#answers + 1] = redis.call('ZCARD', KEYS[i + 2])
  answers[#answers + 1] = found
end
return answers
