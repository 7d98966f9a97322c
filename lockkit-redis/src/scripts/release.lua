-- Ends a lease that is held by the claim, and wakes who waits for the lock.
--
-- KEYS[1]  the lock, also the name of the channel
-- ARGV[1]  "<token>:"
--
-- Returns how many clients were subscribed to the channel
--         -1  there is no such lock
--         -2  it is another's
--         -3  the lease has ended, but this user may not publish to the channel

local lock = KEYS[1]
local value = redis.pcall('GET', lock)
if not value then
  return -1
end
if type(value) ~= 'string' or string.sub(value, 1, 33) ~= ARGV[1] then
  return -2
end
redis.call('DEL', lock)
local receivers = redis.pcall('PUBLISH', lock, '')
return type(receivers) == 'number' and receivers or -3
