-- Takes a lock in the place of the lease that has it, and of no other.
--
-- KEYS[1]  the lock
-- KEYS[2]  its fence counter
-- ARGV[1]  "<token>:" of the lease that is to end
-- ARGV[2]  head of the new value, "<token>:1:"
-- ARGV[3]  tail of the new value, ":<span>:<holder>"
-- ARGV[4]  ttl in ms
-- ARGV[5]  span: how many fences the grant is to own
-- ARGV[6]  first: grant no fence below
-- ARGV[7]  "next" if the counter follows this server's clock; else it follows the clients'
-- mark     a local that goes before: the mark that the lease must have; nil for any
--
-- Returns as batch.lua does  an integer     the lock is the new claim's; its first fence
--                            a string       it was already, and is extended (R1); its value
--                            {pttl, value}  of another holder; {-2, ''} if there is none

local call, sub, format, max, ceil = redis.call, string.sub, string.format, math.max, math.ceil
local HOUR, WEEK, MOST = 3600000, 604800000, 9007199254740991
local lock, counter = KEYS[1], KEYS[2]
local from, head, tail, ttl, more, first, rule = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] - 1, tonumber(ARGV[6]), ARGV[7]

local value = call('GET', lock)
if not value then
  return {-2, ''}
end
if sub(value, 1, 33) == sub(head, 1, 33) then
  call('PEXPIRE', lock, ttl)
  return value
end
local fence, span = string.match(value, '^%x+:%d+:(%d+):(%d+)[@:]')
if sub(value, 1, 33) ~= from or not fence or mark and not string.find(value, '^%x+:%d+:%d+:%d+' .. mark .. ':') then
  return {call('PTTL', lock), value}
end

-- Above what the former lease owns, though its counter may have lapsed.
local time, stored = call('TIME'), call('GET', counter)
local now, last = time[1] * 1000000 + time[2], fence + span - 1
local start = max(first, last + 1, tonumber(stored or 0) + 1, rule == 'next' and not stored and now or 0)
local final = start + more
if final > MOST then
  return redis.error_reply('LOCKKIT the fence counter is beyond 2^53')
end
local life = (rule == 'next' and HOUR or WEEK) + max(0, ceil((final - now) / 1000))
life = format('%.0f', life)
-- A server that is full refuses what takes memory, unless the script has written before. This takes none.
call('PEXPIRE', counter, life)
-- The counter moves before the lock is set, so an error leaves the lease as it was. A gap is harmless.
call('SET', counter, format('%.0f', final), 'PX', life)
call('SET', lock, head .. format('%.0f', start) .. tail, 'PX', ttl)
return start
