-- Takes and ends leases, as requested and in that order. Each request is answered for itself: an error of one is its
-- answer, and nothing to the others. Cites rules of LockStore.
--
-- A request that ends a lease has the key    lock, also the name of the channel
--                             and the argument  "<token>:"
-- A request for a lease has the keys         lock
--                                            counter: the last fence that was given out
--                       and the arguments    head of the value, "<token>:1:"
--                                            tail of the value, ":<span>:<holder>"
--                                            ttl in ms
--                                            span: how many fences the grant is to own
--                                            first: grant no fence below
--                                            mode, by what the first fence of a grant is
--                                              empty  the next of the counter; a new one starts at the server's clock
--                                              "1"    the first that was asked for, if the counter is below
--                                              "2"    the same, where that is the client's clock to within a day
--
-- Returns for each request that ends a lease
--   how many clients were subscribed to the channel
--   -1  there is no such lock
--   -2  it is another's
--   -3  the lease has ended, but this user may not publish to the channel
-- and for each request for a lease
--   an integer    the lock was free and is now the claim's; its first fence
--   a string      the lock was the claim's already and is extended (R1); its value
--   {pttl, value} of the holder
--
-- A server that is full, or read-only, refuses the first call of a request that writes, or none. Only a user that lacks the
-- permission for a command is refused it later.

local protected, call, pcall, sub, format = pcall, redis.call, redis.pcall, string.sub, string.format
local KEYS, ARGV = KEYS, ARGV
local answers, n, key, at = {}, 0, 1, 1

local function release(lock, token)
  local value = pcall('GET', lock)
  if not value then
    return -1
  end
  if type(value) ~= 'string' or sub(value, 1, 33) ~= token then
    return -2
  end
  local ended = pcall('DEL', lock)
  if ended ~= 1 then
    return ended
  end
  local receivers = pcall('PUBLISH', lock, '')
  return type(receivers) == 'number' and receivers or -3
end

-- Never fails, for the lock may be another's.
local function held(lock, value, head, ttl)
  if type(value) ~= 'string' then
    return value
  end
  if sub(value, 1, 33) ~= sub(head, 1, 33) then
    local left = pcall('PTTL', lock)
    return type(left) == 'number' and {left, value} or left
  end
  local extended = pcall('PEXPIRE', lock, ttl)
  return extended == 1 and value or extended
end

local function beyond(last)
  return last > 9007199254740991 and redis.error_reply('LOCKKIT the fence counter is beyond 2^53')
end

local function clock()
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

-- Keeps a counter for a week, or until the clock is a week past it, whichever is later: by then the clock alone starts the
-- next one above everything that was given out.
local function keep(counter, last, now)
  call('PEXPIRE', counter, format('%.0f', 604800000 + math.max(0, math.ceil((last - now) / 1000))))
end

-- The counter moves before the lock is set: an error at either key leaves no lock behind. A gap is harmless.
local function next_fence(lock, counter, head, tail, ttl, span, first)
  local value = pcall('GET', lock)
  if value then
    return held(lock, value, head, ttl)
  end
  local last = pcall('INCRBY', counter, span)
  if type(last) ~= 'number' then
    return last
  end
  local more = span - 1
  local fence, least = last - more, tonumber(first)
  -- New, or not above the floor.
  local anew = fence == 1 or fence < least
  -- By smaller steps it does not outrun the clock.
  if anew or more >= 100 then
    local now = clock()
    if anew then
      fence = math.max(now, least)
      last = fence + more
      call('SET', counter, format('%.0f', last))
    end
    keep(counter, last, now)
  end
  local failure = beyond(last)
  if failure then
    return failure
  end
  call('SET', lock, head .. format('%.0f', fence) .. tail, 'PX', ttl)
  return fence
end

-- In two calls, as a rule: this is what a quorum asks all its nodes for.
local function this_fence(lock, counter, head, tail, ttl, span, first, mode)
  local taken = pcall('SET', lock, head .. first .. tail, 'NX', 'PX', ttl)
  if not taken then
    return held(lock, pcall('GET', lock), head, ttl)
  end
  if taken.err then
    return taken
  end
  local last = span == '1' and first or format('%.0f', first + (span - 1))
  local before = pcall('SET', counter, last, 'KEEPTTL', 'GET')
  -- A counter that goes with the clock need not be kept anew each time, only every 1000 seconds.
  if mode == '2' and before and #before == #last and before < first and sub(before, 1, -10) == sub(last, 1, -10) then
    return tonumber(first)
  end
  local fence, stored = tonumber(first), 0
  if before then
    stored = type(before) == 'string' and string.find(before, '^%d+$') and tonumber(before)
    fence = stored and math.max(stored + 1, fence)
  end
  local failure = fence and beyond(fence + (span - 1))
  if fence and not failure then
    if stored >= tonumber(first) then
      last = format('%.0f', fence + (span - 1))
      call('SET', counter, last)
      call('SET', lock, head .. format('%.0f', fence) .. tail, 'PX', ttl)
    end
    keep(counter, last, clock())
    return fence
  end
  -- All as it was.
  call('DEL', lock)
  if type(before) ~= 'string' then
    return before
  end
  call('SET', counter, before, 'KEEPTTL')
  return failure or redis.error_reply('ERR value is not an integer or out of range')
end

local function acquire(lock, counter, head, tail, ttl, span, first, mode)
  local grant = mode == '' and next_fence or this_fence
  local done, answer = protected(grant, lock, counter, head, tail, ttl, span, first, mode)
  if done then
    return answer
  end
  -- The lock was free, and is so again.
  pcall('DEL', lock)
  if mode == '' then
    -- Else a counter that was to be new would seem to be an old one the next time, and go on from 1.
    pcall('INCRBY', counter, -span)
  end
  -- Before Redis 7 it is a text.
  return type(answer) == 'table' and answer or redis.error_reply('ERR Error running script: ' .. answer)
end

while at <= #ARGV do
  n = n + 1
  local lock, head = KEYS[key], ARGV[at]
  if #head == 33 then
    answers[n] = release(lock, head)
    key, at = key + 1, at + 1
  else
    answers[n] = acquire(lock, KEYS[key + 1], head, unpack(ARGV, at + 1, at + 5))
    key, at = key + 2, at + 6
  end
end
return answers
