-- Takes the lock if it is free, with the next fences of its counter; else says who holds it. Cites rules of LockStore.
--
-- KEYS[1]  the lock
-- KEYS[2]  its fence counter: the last fence that was given out
-- ARGV[1]  head of the value, "<token>:1:"
-- ARGV[2]  ttl in ms
-- ARGV[3]  tail of the value, ":<span>:<holder>"
-- ARGV[4]  span: how many fences the grant is to own
-- ARGV[5]  floor: grant above it; absent for 0
-- ARGV[6]  absent: a new counter starts at the server's clock; present: just above the floor
--
-- Returns an integer:  the lock was free and is now the claim's; its first fence
--         a string:    the lock was the claim's already and is extended (R1); its value
--         {pttl, value} of the holder otherwise
--
-- The counter moves before the lock is set: an error at either key leaves no lock behind. A gap is harmless.

local call, lock, counter, head, ttl, span = redis.call, KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[4]

local value = call('GET', lock)
if value then
  if string.sub(value, 1, 33) == string.sub(head, 1, 33) then
    call('PEXPIRE', lock, ttl)
    return value
  end
  return {call('PTTL', lock), value}
end

local last = call('INCRBY', counter, span)
local first = last - span + 1
local floor = ARGV[5] and tonumber(ARGV[5]) or 0
if first == 1 or first <= floor then
  -- New, or not above the floor. It lives a week, or until the clock is a week past it, whichever is later: by then
  -- the clock alone starts the next one above everything that was given out.
  local time = call('TIME')
  local now = time[1] * 1000000 + time[2]
  first = math.max(ARGV[6] and 0 or now, floor + 1)
  last = first + span - 1
  local seconds = 604800 + math.max(0, math.ceil((last - now) / 1000000))
  local text = string.format('%.0f', last)
  if text ~= string.format('%d', last) then
    return redis.error_reply('LOCKKIT the server is a 32-bit build; its scripts can not spell a fence')
  end
  call('SET', counter, text, 'EX', string.format('%.0f', seconds))
end
if last > 9007199254740991 then
  return redis.error_reply('LOCKKIT the fence counter is beyond 2^53')
end

call('SET', lock, string.format('%s%d%s', head, first, ARGV[3]), 'PX', ttl)
return first
