-- Takes and ends leases of locks that are shared, or whose waiters are served in the order in which they came; renews those
-- that are shared.
-- Cites rules of LockStore.
--
-- KEYS[1]  the lock, also the name of the channel on which those hear of its release who do not queue
-- KEYS[2]  its fence counter
-- KEYS[3]  members: a sorted set of the tokens that share the lock, by the time when their leases end, in ms
-- KEYS[4]  leases: a hash from these tokens to values as an exclusive lock has them
-- KEYS[5]  queue: a sorted set of the tokens that wait, by their place
-- KEYS[6]  places: a hash from these tokens to "<mode>|<ttl>|<span>|<least>|<until>|<length of channel>|<channel><tail>"; and
--          from "permits" to the mode of the last that came to wait for one
-- ARGV[1]  what to do: take, replace, renew or end
-- ARGV[2]  token
-- ARGV[3]  first: no new fence below
-- ARGV[4]  1 if this server may grant
-- take     ARGV[5 .. 11]  mode ("x", "s" or "p<limit>"), ttl in ms, span, least: no fence below for this claim; how long the
--                         place in the queue is kept in ms (0 for a try), the channel on which the claim hears that it was
--                         granted, tail of the value
-- replace  the same, and ARGV[12]: the token of the exclusive lease in whose place the claim, one of readers, takes the lock
-- renew    ARGV[5 .. 8]   ttl in ms, depth, tail that the value is to have (empty to leave it), floor of the counter (or empty)
-- mark     a local that goes before: the mark that a lease must have to be renewed or replaced; nil for any
-- run_mark a local that goes before: that of the server's run, by whose clock the moments are; nil if there is no mark
--
-- Returns  take   a string                 the lock is the claim's; its value
--                 {pttl, value, place}     it is not; the claim's place in the queue from 0 on, or the one that it would have
--                 -4                       it is a semaphore of another limit
--          replace as take, but for -4; {-2, ''} if the lock is free
--          renew  {answer}                 as renew.lua answers for each lease
--          end    0                        the lease has ended
--                 -1, -2                   there is no such lock; it is another's
--
-- While the lock is shared its key has a value that is nobody's, "#s:<fence><run_mark>" or "#p<limit>:<fence><run_mark>", and lasts as long
-- as the longest of the leases, so that batch.lua finds the lock held. A lease in the set counts only while that value is there.
-- A claim that found the lock free shares it with nobody yet: the value is then "#s:<lease>" or "#p<limit>:<lease>", and the set
-- and the hash are made once this script is run for anything but the end of that lease.
--
-- A place in the queue has a lease of its own, for waiters that are gone. The release of a lock grants it to the first in the
-- queue that listens: until the end of its place at most, for what it knows is that it kept that. It asks for the rest.

local call, format, max, min, ceil, match = redis.call, string.format, math.max, math.min, math.ceil, string.match
local HOUR, MOST = 3600000, 9007199254740991
-- How many are granted the lock, or are passed by or lapsed, in one step: the server serves nobody else meanwhile.
local STEP, PASSED = 100, 1000
local BEYOND = 'LOCKKIT the fence counter is beyond 2^53'
local lock, counter, members, leases, queue, places = unpack(KEYS)
local op, me, first, may_grant = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'
local value = call('GET', lock)

-- The server's clock in microseconds, and in milliseconds. It stands still while the script runs.
local us, now
local function clock()
  if not us then
    local time = call('TIME')
    us = time[1] * 1000000 + time[2]
    now = math.floor(us / 1000)
  end
  return us, now
end

local function int(number)
  return format('%.0f', number)
end

-- Moves the counter as batch.lua does. Returns the first of `span` fences; nil if there are none.
local function next_fence(span, least)
  local more = span - 1
  local fence = call('INCRBY', counter, int(span)) - more
  if fence < 1e15 or fence < least or (fence + more) % 1e9 <= more then
    local us = clock()
    if fence < 1e15 or fence < least then
      fence = max(fence, us, least)
    end
    if fence + more > MOST then
      return nil
    end
    call('SET', counter, int(fence + more), 'PX', int(HOUR + max(0, ceil((fence + more - us) / 1000))))
  end
  return fence + more <= MOST and int(fence) or nil
end

-- As a rule nobody waits, and the lock is free, or this claim has it alone. Each run makes its functions anew, and to make all
-- those below takes longer than this.
if op == 'take' and not value and may_grant and call('EXISTS', queue) == 0 then
  local mode, ttl, span, least, tail = ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[11]
  local fence = next_fence(tonumber(span), max(tonumber(least), first))
  if not fence then
    return redis.error_reply(BEYOND)
  end
  local lease = me .. ':1:' .. fence .. tail
  call('SET', lock, mode == 'x' and lease or '#' .. mode .. ':' .. lease, 'PX', ttl)
  return lease
elseif op == 'end' and value and (string.sub(value, 1, 33) == me .. ':' or match(value, '^#[sp]%d*:(%x+):') == me)
  and call('EXISTS', queue) == 0 then
  call('DEL', lock)
  redis.pcall('PUBLISH', lock, '')
  return 0
end

-- When a lease ends that begins now, in ms: it lasts no less than its ttl.
local function end_of(ttl)
  return ceil(clock() / 1000) + ttl
end

-- How the lock is shared; nil if it is free or held by one.
local function sharing()
  return value and (match(value, '^#(s):%d+@?%x*$') or match(value, '^#(p%d+):%d+@?%x*$'))
end

-- What belongs to the leases lasts as long as the longest of them.
local function last_until(ends)
  call('PEXPIREAT', members, ends)
  call('PEXPIREAT', leases, ends)
end

-- After leases have ended.
local function settle()
  local _, now = clock()
  local longest = call('ZRANGE', members, -1, -1, 'WITHSCORES')
  if longest[1] and tonumber(longest[2]) > now then
    call('PEXPIREAT', lock, longest[2])
    last_until(longest[2])
  else
    call('DEL', lock, members, leases)
    value = false
  end
end

local function drop_lapsed()
  if sharing() then
    local _, now = clock()
    local lapsed = call('ZRANGEBYSCORE', members, '-inf', now, 'LIMIT', 0, STEP)
    if lapsed[1] then
      call('ZREM', members, unpack(lapsed))
      call('HDEL', leases, unpack(lapsed))
      settle()
    end
  end
end

local function has_room(mode)
  if not value then
    return true
  end
  return sharing() == mode and (mode == 's' or call('ZCARD', members) < tonumber(string.sub(mode, 2)))
end

local function share(token, mode, ends, fence, lease)
  local is_new = not value
  if is_new then
    -- What a former group has left, whose lock lapsed or was deleted.
    call('DEL', members, leases)
  end
  call('ZADD', members, int(ends), token)
  call('HSET', leases, token, lease)
  -- After them: without it they count for nothing.
  local shared = '#' .. mode .. ':' .. fence .. (run_mark or '')
  if value ~= shared then
    value = shared
    call('SET', lock, value, 'PX', int(ends - now))
  end
  if is_new then
    last_until(int(ends))
  else
    settle()
  end
end

-- Returns the lease. The counter moves before the lock is set, so an error leaves no lock. A gap is harmless.
local function grant(token, mode, ttl, ends, span, least, tail)
  -- Readers that share the lock have one number, as long as it is high enough for each. (A server that lost some data can have
  -- a group again that had ended.)
  local fence = mode == 's' and span == '1' and value and match(value, ':(%d+)@?%x*$')
  least = max(tonumber(least), first)
  if not fence or tonumber(fence) < least then
    fence = next_fence(tonumber(span), least)
  end
  if not fence then
    return redis.error_reply(BEYOND)
  end
  local lease = token .. ':1:' .. fence .. tail
  if mode == 'x' and not ends then
    value = lease
    call('SET', lock, value, 'PX', ttl)
    return lease
  end
  local _, now = clock()
  ends = min(end_of(ttl), ends or math.huge)
  if mode == 'x' then
    value = lease
    call('SET', lock, value, 'PX', int(ends - now))
  else
    share(token, mode, ends, fence, lease)
  end
  return lease
end

local function leave(token)
  call('HDEL', places, token)
  if call('ZREM', queue, token) == 1 and call('EXISTS', queue) == 0 then
    call('DEL', places)
  end
end

-- Whether a claim that waits can be told. Its connection may be gone; it keeps its place.
local function listens(channel)
  local answer = redis.pcall('PUBSUB', 'NUMSUB', channel)
  return answer.err or answer[2] > 0
end

-- Whether the place of a claim is of this server's own time in charge. A lease that is granted with the tail of an earlier one has
-- a mark that no renewal finds. Its waiter asks again, for a place with the present mark.
local function is_present(tail)
  return not mark or string.find(tail, '^:%d+' .. mark .. ':')
end

-- Grants the lock to those in front of the queue that listen, as far as there is room. Returns the claim's own new value, if it
-- was one of them, and whether nobody is in front of those that have no place.
local function serve()
  local at, granted, lapsed, mine = 0, 0, 0, nil
  while may_grant and granted < STEP and at + lapsed < PASSED do
    local token = call('ZRANGE', queue, at, at)[1]
    if not token then
      return mine, true
    end
    if at + granted + lapsed == 0 then
      drop_lapsed()
    end
    local _, now = clock()
    local place = call('HGET', places, token) or ''
    local mode, ttl, span, least, ends, length, rest = match(place, '^(.-)|(.-)|(.-)|(.-)|(.-)|(%d+)|(.*)$')
    local channel, tail = string.sub(rest or '', 1, length), string.sub(rest or '', (length or 0) + 1)
    if not mode or tonumber(ends) <= now then
      leave(token)
      lapsed = lapsed + 1
    elseif not has_room(mode) then
      if token == me or listens(channel) then
        return mine, false
      end
      at = at + 1
    elseif token == me then
      leave(token)
      if op == 'take' then
        -- What it asks for now. Its place may have moved here with the slot, and a lease with the mark of the member that had
        -- it could not be renewed.
        ttl, span, least, tail = ARGV[6], ARGV[7], ARGV[8], ARGV[11]
      end
      mine = grant(token, mode, ttl, nil, span, least, tail)
      granted = granted + 1
    elseif is_present(tail) and listens(channel) then
      leave(token)
      grant(token, mode, ttl, tonumber(ends), span, least, tail)
      redis.pcall('PUBLISH', channel, '')
      granted = granted + 1
    else
      at = at + 1
    end
  end
  return mine, false
end

-- How the claim has the lock: alone, or as one of those that share it; nil if it has not.
local function held()
  if value and string.sub(value, 1, 33) == me .. ':' then
    return 'alone'
  end
  local ends = sharing() and call('ZSCORE', members, me)
  if ends then
    local _, now = clock()
    return tonumber(ends) > now and 'shared' or nil
  end
end

-- Whether others hold or await permits of another number.
local function is_other_limit(mode)
  if string.sub(mode, 1, 1) ~= 'p' then
    return false
  end
  local shared = sharing()
  if shared and string.sub(shared, 1, 1) == 'p' then
    return shared ~= mode
  end
  -- The number of the last one that came to wait, who may have gone. As a rule all agree.
  local noted = call('HGET', places, 'permits')
  if not noted or noted == mode then
    return false
  end
  local _, now = clock()
  for _, token in ipairs(call('ZRANGE', queue, 0, -1)) do
    local its_mode, ends = match(call('HGET', places, token) or '', '^(p%d+)|.-|.-|.-|(.-)|')
    if its_mode and its_mode ~= mode and tonumber(ends) > now then
      return true
    end
  end
  return false
end

local function extend(ttl)
  call('ZADD', members, 'XX', int(end_of(ttl)), me)
  settle()
end

-- A write that takes no memory, and changes nothing. A server that is full refuses what takes memory, unless the script has written
-- before.
local function write_nothing()
  call('HDEL', places, '')
end

-- A server that was made a replica refuses each write. Goes before an answer that took none: it would be of what that server has,
-- which may be old.
local function check_writable()
  -- With a mark, guard.lua has asked.
  if not mark then
    write_nothing()
  end
end

-- How the lock is shared by one claim alone, the token and the fence of that; nil if it is not.
local function lone()
  local rest = ':(%x+):%d+:(%d+):%d+[@:]'
  local mode, token, fence = match(value, '^#(s)' .. rest)
  if not mode then
    mode, token, fence = match(value, '^#(p%d+)' .. rest)
  end
  if mode and #token == 32 then
    return mode, token, fence
  end
end

local lone_mode, lone_token, lone_fence
if value then
  lone_mode, lone_token, lone_fence = lone()
end
if lone_mode then
  local lease = string.sub(value, #lone_mode + 3)
  if op == 'end' and lone_token == me then
    -- As if it were exclusive.
    value = lease
  else
    -- It becomes a group of one. A key lapses after the millisecond that its ttl ends in, a lease in the set with its beginning. A
    -- key that somebody has made to last for ever tells no end of the lease.
    local left = call('PTTL', lock)
    local _, now = clock()
    value = false
    share(lone_token, lone_mode, now + (left < 0 and HOUR or left + 1), lone_fence, lease)
  end
end
if run_mark and sharing() and string.sub(value, -#run_mark) ~= run_mark then
  -- The slot came from another member, with moments of that one's clock, or this server took over. No lease outlasts the lock's key,
  -- whose time to live `MIGRATE` moves as a duration. So all are kept for as long as that.
  write_nothing()
  local left, _, now = call('PTTL', lock), clock()
  local ends = int(now + (left < 0 and HOUR or left + 1))
  for _, token in ipairs(call('ZRANGE', members, 0, -1)) do
    call('ZADD', members, 'XX', ends, token)
  end
  value = match(value, '^[^@]*') .. run_mark
  call('SET', lock, value, 'KEEPTTL')
end
local how = held()

if op == 'renew' then
  local ttl, depth, tail, floor = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
  local lease = how == 'shared' and call('HGET', leases, me)
  if not lease then
    check_writable()
    return {value and 1 or 0}
  end
  if mark and not string.find(lease, '^%x+:%d+:%d+:%d+' .. mark .. ':') then
    return {3}
  end
  local granted, holder = match(lease, '^%x+:%d+:(%d+:%d+@?%x*)(:.*)$')
  lease = me .. ':' .. depth .. ':' .. granted .. (tail == '' and holder or tail)
  write_nothing()
  call('HSET', leases, me, lease)
  extend(ttl)
  if floor ~= '' then
    local least, last = tonumber(floor), tonumber(call('GET', counter) or 0)
    if least > last then
      last = tonumber(next_fence(1, least) or last)
    end
    -- Readers that come later have the number of their group, and not the counter's.
    local fence = match(value, '^#s:(%d+)')
    if fence and tonumber(fence) < least then
      value = '#s:' .. int(last) .. (run_mark or '')
      call('SET', lock, value, 'KEEPTTL')
    end
  end
  return {lease}
end

if op == 'end' then
  local answer = value and -2 or -1
  if how == 'alone' then
    call('DEL', lock)
    value = false
  elseif how == 'shared' then
    call('ZREM', members, me)
    call('HDEL', leases, me)
    settle()
  else
    leave(me)
  end
  -- An error, such as of a counter that is no number, would say that the lease has not ended. Those that wait ask again, and get it.
  pcall(serve)
  if how then
    answer = 0
    if not value then
      redis.pcall('PUBLISH', lock, '')
    end
  end
  return answer
end

local mode, ttl, span, least, kept, channel, tail = unpack(ARGV, 5, 11)
if how then
  leave(me)
  if how == 'alone' then
    call('PEXPIRE', lock, ttl)
    return value
  end
  extend(ttl)
  -- There may have been more than one step takes. An error would say that nothing was done.
  pcall(serve)
  return call('HGET', leases, me)
end
if op == 'replace' then
  local fence, more = match(value or '', '^%x+:%d+:(%d+):(%d+)[@:]')
  if not fence or not may_grant or string.sub(value, 1, 33) ~= ARGV[12] .. ':'
    or mark and not string.find(value, '^%x+:%d+:%d+:%d+' .. mark .. ':') then
    check_writable()
    return value and {call('PTTL', lock), value, call('ZCARD', queue)} or {-2, ''}
  end
  write_nothing()
  -- Above what that lease owns, though its counter may have lapsed. The lock's key is there until the group of readers has it.
  first, value = max(first, fence + more), false
  local lease = grant(me, mode, ttl, nil, span, least, tail)
  pcall(serve)
  return lease
end
drop_lapsed()
if is_other_limit(mode) then
  leave(me)
  serve()
  return -4
end
if may_grant and call('EXISTS', queue) == 0 and has_room(mode) then
  return grant(me, mode, ttl, nil, span, least, tail)
end
check_writable()
if kept ~= '0' then
  write_nothing()
  local us, now = clock()
  local last = call('ZRANGE', queue, -1, -1, 'WITHSCORES')[2]
  call('ZADD', queue, 'NX', int(max(us, (last or 0) + 1)), me)
  call('HSET', places, me, table.concat({mode, ttl, span, least, int(now + kept), #channel, channel .. tail}, '|'))
  if string.sub(mode, 1, 1) == 'p' then
    call('HSET', places, 'permits', mode)
  end
  call('PEXPIRE', queue, kept)
  call('PEXPIRE', places, kept)
end
local lease, is_first = serve()
if lease then
  return lease
end
if is_first and has_room(mode) then
  return grant(me, mode, ttl, nil, span, least, tail)
end
return {call('PTTL', lock), value or '', call('ZRANK', queue, me) or call('ZCARD', queue)}
