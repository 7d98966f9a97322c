-- Extends leases that are still held by their claims. Never creates one (R5). Each is answered for itself: an error of one
-- is its answer, and nothing to the others.
--
-- KEYS[1 .. n]         the locks
-- KEYS[n+1 .. 2n]      their fence counters, only if floors and tails are given
-- ARGV[1]              ttl in ms
-- ARGV[2]              n
-- ARGV[3 .. n+2]       head that each value is to have, "<token>:<depth>:"
-- ARGV[n+3 .. 2n+2]    floors: raise the counter to at least this; empty to leave it
-- ARGV[2n+3 .. 3n+2]   tails that the values are to have, ":<holder>"; empty to leave them
-- mark                  a local that goes before: the mark that the leases must have; nil for any
--
-- Returns for each lock  its value  it is held and extended
--                        0          there is no such lock
--                        1          it is another's
--                        2          it is held and was extended, but its counter is no number
--                        3          it was granted by a server that is not in charge any more
--                        an error   it may have been extended

local pcall, sub = redis.pcall, string.sub
local ttl, n = ARGV[1], tonumber(ARGV[2])

-- Raises a counter, never below what the lease itself owns (the counter may have expired in the meantime). It lives for a
-- week then: floors come from a quorum, whose clients' clocks may differ by more than an hour. Returns what is to be
-- answered if it can't.
local function raise(counter, floor, value)
  local stored = pcall('GET', counter)
  local number = tonumber(stored or 0)
  if not number then
    return 2
  end
  local fence, span = string.match(value, '^%x+:%d+:(%d+):(%d+)[@:]')
  local last = math.max(tonumber(floor), fence and fence + span - 1 or 0)
  if number < last then
    local time = pcall('TIME')
    if time.err then
      return time
    end
    if not stored then
      -- Above what an evicted or lapsed counter may have given out, as when a lock is taken.
      last = math.max(last, time[1] * 1000000 + time[2])
    end
    local seconds = 604800 + math.max(0, math.ceil(last / 1000000 - time[1]))
    local raised = pcall('SET', counter, string.format('%.0f', last), 'EX', string.format('%.0f', seconds))
    return raised.err and raised
  end
end

local function extend(lock, value, head, counter, floor, tail)
  local is_same = sub(value, 1, #head) == head and tail == ''
  local grant, holder
  if not is_same then
    grant, holder = string.match(value, '^%x+:%d+:(%d+:%d+@?%x*)(:.*)$')
    if not grant then
      return 1
    end
  end
  -- Always, and first: a server that is full refuses SET, unless the script has written before what takes no memory.
  local extended = pcall('PEXPIRE', lock, ttl)
  if type(extended) == 'table' then
    return extended
  end
  if not is_same then
    value = head .. grant .. (tail == '' and holder or tail)
    local written = pcall('SET', lock, value, 'PX', ttl)
    if written.err then
      return written
    end
  end
  return floor ~= '' and raise(counter, floor, value) or value
end

local answers = {}
for i = 1, n do
  local lock, head = KEYS[i], ARGV[i + 2]
  local value = pcall('GET', lock)
  if not value then
    answers[i] = 0
  elseif type(value) == 'table' and not string.find(value.err, 'WRONGTYPE', 1, true) then
    answers[i] = value
  elseif type(value) ~= 'string' or sub(value, 1, 33) ~= sub(head, 1, 33) then
    answers[i] = 1
  elseif mark and not string.find(value, '^%x+:%d+:%d+:%d+' .. mark .. ':') then
    answers[i] = 3
  else
    answers[i] = extend(lock, value, head, KEYS[n + i], ARGV[n + 2 + i] or '', ARGV[2 * n + 2 + i] or '')
  end
end
return answers
