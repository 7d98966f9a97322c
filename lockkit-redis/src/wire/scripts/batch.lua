-- Takes and ends leases, as requested and in that order. Each request is answered for itself: an error of one is its
-- answer, and nothing to the others. Cites rules of LockStore.
--
-- A request that ends a lease has the key       lock, also the name of the channel
--                             and the argument  "<token>:"
-- A request for a lease has the keys            lock
--                                               counter: the last fence that was given out
--                       and the arguments       head of the value, "<token>:1:"
--                                               tail of the value, ":<span>:<holder>"
--                                               ttl in ms
--                                               span: how many fences the grant is to own
--                                               first: grant no fence below
--                                               rule for the first fence of a grant
--                                                 next   the next of the counter; a new one starts at the server's clock
--                                                 asked  the one that was asked for, if the counter is below
--                                                 clock  the same, where that is the client's clock to within a day
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
-- permission for a command is refused it later. No call raises an error: it would be the answer to all requests.
--
-- A counter lives for an hour, or for an hour after the clock has passed it, whichever is later: then the clock alone starts
-- the next one above it. One that follows the clients' clocks (asked, clock) lives for a week, because clients may differ by more.

local pcall, sub, find, format, max, ceil = redis.pcall, string.sub, string.find, string.format, math.max, math.ceil
local HOUR, WEEK, MOST = 3600000, 604800000, 9007199254740991
local KEYS, ARGV = KEYS, ARGV
local answers, n, key, at = {}, 0, 1, 1

while at <= #ARGV do
  local lock, head, answer = KEYS[key], ARGV[at]

  if #head == 33 then -- End a lease.
    key, at = key + 1, at + 1
    local value = pcall('GET', lock)
    if not value then
      answer = -1
    elseif type(value) == 'table' and not find(value.err, 'WRONGTYPE', 1, true) then
      answer = value
    elseif type(value) ~= 'string' or sub(value, 1, 33) ~= head then
      answer = -2
    else
      answer = pcall('DEL', lock)
      if answer == 1 then
        answer = pcall('PUBLISH', lock, '')
        answer = type(answer) == 'number' and answer or -3
      end
    end

  else -- Take a lease.
    local counter, tail, ttl, span = KEYS[key + 1], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
    local first, rule, more = ARGV[at + 4], ARGV[at + 5], ARGV[at + 3] - 1
    key, at = key + 2, at + 6
    local value, taken
    if rule == 'next' then
      value = pcall('GET', lock)
    else
      -- A quorum asks all its nodes for this. As a rule it takes two calls.
      taken = pcall('SET', lock, head .. first .. tail, 'NX', 'PX', ttl)
      value = not taken and pcall('GET', lock)
    end

    if value then -- The lock is held: changes nothing but the time that the claim's own lease has left.
      if type(value) ~= 'string' then
        answer = value
      elseif sub(value, 1, 33) == sub(head, 1, 33) then
        answer = pcall('PEXPIRE', lock, ttl)
        answer = answer == 1 and value or answer
      else
        answer = pcall('PTTL', lock)
        answer = type(answer) == 'number' and {answer, value} or answer
      end

    elseif not taken then -- next: the counter moves before the lock is set, so an error leaves no lock. A gap is harmless.
      local fence, least = pcall('INCRBY', counter, span), tonumber(first)
      if type(fence) ~= 'number' then
        answer = fence
      else
        fence = fence - more
        -- A counter that is new (before 2001 by the clock), or not above the floor. A counter may be ahead of the clock, too: each time it passes a
        -- multiple of 10^9, its expiry is set again, so that it outlasts its own fences.
        if fence < 1e15 or fence < least or (fence + more) % 1e9 <= more then
          local time = pcall('TIME')
          if time.err then
            answer = time
          else
            local now = time[1] * 1000000 + time[2]
            if fence < 1e15 or fence < least then
              fence = max(fence, now, least)
            end
            local life = HOUR + max(0, ceil((fence + more - now) / 1000))
            local kept = fence + more <= MOST and pcall('SET', counter, format('%.0f', fence + more), 'PX', format('%.0f', life))
            answer = kept and kept.err and kept
          end
        end
        if not answer and fence + more > MOST then
          answer = redis.error_reply('LOCKKIT the fence counter is beyond 2^53')
        end
        if not answer then
          local set = pcall('SET', lock, head .. format('%.0f', fence) .. tail, 'PX', ttl)
          answer = set.err and set or fence
        end
      end

    elseif taken.err then
      answer = taken

    else -- asked, clock: the lock is set already, and freed again if the counter can't follow.
      local last = span == '1' and first or format('%.0f', first + more)
      local before = pcall('SET', counter, last, 'KEEPTTL', 'GET')
      local is_text = type(before) == 'string'
      if rule == 'clock' and is_text and #before == #last and before < first and sub(before, 1, -10) == sub(last, 1, -10) then
        -- Made to last longer within the same thousand seconds: that is often enough.
        answer = tonumber(first)
      elseif before and not is_text then
        answer = before
      else
        local stored, time = tonumber(before or -1), pcall('TIME')
        if time.err then
          answer = time
        elseif not stored or is_text and find(before, '%D') then
          answer = redis.error_reply('ERR value is not an integer or out of range')
        else
          local fence = max(stored + 1, tonumber(first))
          local final = fence + more
          local life = WEEK + max(0, ceil(final / 1000 - time[1] * 1000 - time[2] / 1000))
          if final > MOST then
            answer = redis.error_reply('LOCKKIT the fence counter is beyond 2^53')
          else
            answer = pcall('SET', counter, format('%.0f', final), 'PX', format('%.0f', life))
          end
          if not answer.err and stored >= tonumber(first) then
            answer = pcall('SET', lock, head .. format('%.0f', fence) .. tail, 'PX', ttl)
          end
          answer = answer.err and answer or fence
        end
      end
      if type(answer) == 'table' then -- All as it was.
        pcall('DEL', lock)
        if is_text then
          pcall('SET', counter, before, 'KEEPTTL')
        elseif not before then
          pcall('DEL', counter)
        end
      end
    end
  end
  n = n + 1
  answers[n] = answer
end
return answers
